"""A server for OpenAI clients: the command `batch-manager serve`. See openai_server.md.

    python examples/openai_server.py MODEL --port 8000
    gunicorn -k uvicorn.workers.UvicornWorker -w 2 --chdir examples 'openai_server:make_app("models/austen-4m")'
"""

import sys

from batch_manager.tools.serve import main, not_installed

try:
    import uvicorn  # noqa: F401 - named here if it is missing

    from batch_manager.extras.openai.application import make_app
except ImportError as error:
    sys.exit(not_installed("openai_server", error))

__all__ = ["make_app"]

if __name__ == "__main__":
    sys.exit(main(program="openai_server"))
