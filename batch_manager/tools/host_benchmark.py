"""The former name of `batch_manager.tools.host_bench`, kept for scripts."""

from .host_bench import Setting, Stopwatch, main, make_loop, measure

__all__ = ["Setting", "Stopwatch", "main", "make_loop", "measure"]

if __name__ == "__main__":
    raise SystemExit(main())
