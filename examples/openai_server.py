"""A server for OpenAI clients: the command `batch-manager serve`. See openai_server.md.

    python examples/openai_server.py MODEL --port 8000
    gunicorn -k uvicorn.workers.UvicornWorker -w 2 --chdir examples 'openai_server:make_app("models/austen-4m")'
"""

import sys

from batch_manager.tools.serve import main, not_installed

try:
    import uvicorn  # noqa: F401 - named here if it is missing

    if __name__ != "__main__":         # for gunicorn; the command imports it once its options are right
        from batch_manager.extras.openai.application import make_app  # noqa: F401
except ImportError as error:
    sys.exit(not_installed("openai_server", error))

if __name__ == "__main__":
    sys.exit(main(program="openai_server"))
