"""Write a model repository for Triton Inference Server that runs a GptManager.

    python examples/triton_server/make_repository.py FOLDER --model CHECKPOINT [key=value ...] [--run]

The program writes config.pbtxt and a Python backend to FOLDER/gpt. A key is a parameter of TensorRT-LLM's Triton
backend, or a field of TrtGptModelOptionalParams or KvCacheConfig. With --run, the program then starts the server of the
package nvidia-pytriton.
"""

import os
import shutil
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import triton_settings  # noqa: E402

import batch_manager  # noqa: E402
from batch_manager.tools.command_parser import CommandParser  # noqa: E402
from batch_manager.tools.standard_output import reported  # noqa: E402

HOST_FILES = ("triton_host.py", "triton_metrics.py", "triton_settings.py")

# (name, type, dimensions without the batch dimension), as in TensorRT-LLM's Triton backend.
INPUTS = [
    ("input_ids", "INT32", "-1"), ("input_lengths", "INT32", "1"), ("request_output_len", "INT32", "1"),
    ("draft_input_ids", "INT32", "-1"), ("draft_logits", "FP32", "-1, -1"), ("end_id", "INT32", "-1"),
    ("pad_id", "INT32", "1"), ("stop_words_list", "INT32", "2, -1"), ("bad_words_list", "INT32", "2, -1"),
    ("embedding_bias", "FP32", "-1"), ("beam_width", "INT32", "1"), ("temperature", "FP32", "1"),
    ("runtime_top_k", "INT32", "1"), ("runtime_top_p", "FP32", "1"), ("runtime_top_p_min", "FP32", "1"),
    ("runtime_top_p_decay", "FP32", "1"), ("runtime_top_p_reset_ids", "INT32", "1"), ("runtime_min_p", "FP32", "1"),
    ("len_penalty", "FP32", "1"), ("early_stopping", "INT32", "1"), ("beam_search_diversity_rate", "FP32", "1"),
    ("repetition_penalty", "FP32", "1"), ("min_length", "INT32", "1"), ("presence_penalty", "FP32", "1"),
    ("frequency_penalty", "FP32", "1"), ("no_repeat_ngram_size", "INT32", "1"), ("random_seed", "UINT64", "1"),
    ("prompt_ignore_length", "INT32", "1"), ("return_top_log_probs", "INT32", "1"), ("raw_log_probs", "BOOL", "1"),
    ("return_log_probs", "BOOL", "1"), ("return_context_logits", "BOOL", "1"),
    ("return_generation_logits", "BOOL", "1"), ("stop", "BOOL", "1"), ("streaming", "BOOL", "1"),
    ("prompt_embedding_table", "FP32", "-1, -1"), ("prompt_vocab_size", "INT32", "1"),
    ("lora_task_id", "UINT64", "1"), ("lora_weights", "FP32", "-1, -1"), ("lora_config", "INT32", "-1, 3"),
]
REQUIRED = ("input_ids", "request_output_len")
OUTPUTS = [
    ("output_ids", "INT32", "-1, -1"), ("sequence_length", "INT32", "-1"), ("cum_log_probs", "FP32", "-1"),
    ("output_log_probs", "FP32", "-1, -1"), ("context_logits", "FP32", "-1, -1"),
    ("generation_logits", "FP32", "-1, -1, -1"), ("finish_reason", "INT32", "-1"),
    ("top_log_prob_ids", "INT32", "-1, -1, -1"), ("top_log_probs", "FP32", "-1, -1, -1"),
]


def config_text(name: str, parameters: dict[str, str]) -> str:
    """Return the text of config.pbtxt. Triton's max_batch_size is 1, because the manager does the batching."""
    def tensor(entry: tuple[str, str, str], more: str = "") -> str:
        return f'  {{ name: "{entry[0]}" data_type: TYPE_{entry[1]} dims: [ {entry[2]} ]{more} }}'

    inputs = ",\n".join(tensor(entry, "" if entry[0] in REQUIRED else " optional: true") for entry in INPUTS)
    return "\n".join([
        f'name: "{name}"', 'backend: "python"', "max_batch_size: 1",
        "model_transaction_policy { decoupled: true }", "instance_group [ { count: 1 kind: KIND_CPU } ]",
        f"input [\n{inputs}\n]", "output [\n" + ",\n".join(map(tensor, OUTPUTS)) + "\n]",
        *(f'parameters {{ key: "{key}" value: {{ string_value: "{_escaped(value)}" }} }}'
          for key, value in {"FORCE_CPU_ONLY_INPUT_TENSORS": "yes", **parameters}.items()), ""])


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def model_text(folders: list[str]) -> str:
    """Return the text of model.py, which adds the package folders to `sys.path`.

    This is necessary because the server's Python ignores this virtual environment and PYTHONPATH.
    """
    return f'''"""Written by make_repository.py: adds the package folders, then imports the host from this folder."""

import os
import site
import sys

before = set(sys.path)
for folder in {folders!r}:
    site.addsitedir(folder)                             # also processes .pth files, for editable installs
sys.path.sort(key=lambda folder: folder in before)      # first, because others may have another NumPy
sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from triton_host import TritonPythonModel  # noqa: E402, F401
'''


def write_repository(folder: Path, name: str, parameters: dict[str, str]) -> None:
    """Write FOLDER/NAME. Raises SettingError or ConfigError for invalid parameters, without writing a file."""
    triton_settings.read(parameters)
    packages = [str(Path(batch_manager.__file__).resolve().parents[1])]
    packages += dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"),
                               *(path for path in sys.path if path.endswith("site-packages"))])
    version = folder / name / "1"
    version.mkdir(parents=True, exist_ok=True)
    for file in HOST_FILES:
        shutil.copy(HERE / file, version)
    (version / "model.py").write_text(model_text(packages), encoding="utf-8")
    (folder / name / "config.pbtxt").write_text(config_text(name, parameters), encoding="utf-8")


def server_command(folder: Path, http_port: int, grpc_port: int, metrics_port: int) -> tuple[list[str], dict[str, str]]:
    """Return the command line and the environment of nvidia-pytriton's server.

    Creates FOLDER.backends with links to the server's Python backend and to its stub for this version of Python. Raises
    SystemExit with the reason if the server cannot run.
    """
    spec = find_spec("pytriton")
    if spec is None:
        raise SystemExit('--run needs the server of nvidia-pytriton: pip install -e ".[triton-server]"')
    if not _numpy_is_old():
        raise SystemExit('NumPy is 2 or newer; outputs of this server would be empty; pip install "numpy<2"')
    server = Path(spec.origin).parent / "tritonserver"
    python = "{}.{}".format(*sys.version_info)
    backends = folder.with_name(folder.name + ".backends")
    stub = server / "python_backend_stubs" / python / "triton_python_backend_stub"
    if not stub.exists():
        raise SystemExit(f"nvidia-pytriton has no Python backend stub for Python {python}; use a Python version that "
                         f"has a folder in {stub.parents[1]}")
    (backends / "python").mkdir(parents=True, exist_ok=True)
    for file in (*(server / "backends" / "python").glob("*.*"), stub):
        link = backends / "python" / file.name
        link.unlink(missing_ok=True)
        link.symlink_to(file)
    libraries = [str(path) for path in (server / "external_libs", server / "lib", Path(sys.base_prefix) / "lib")
                 if path.is_dir()]          # the last folder has this interpreter's libpython, for the stub
    path = os.environ.get("LD_LIBRARY_PATH")
    command = [str(server / "bin" / "tritonserver"), f"--model-repository={folder}", f"--backend-directory={backends}",
               "--disable-auto-complete-config", "--exit-timeout-secs=5",
               *(f"--{kind}-address=127.0.0.1" for kind in ("http", "grpc", "metrics")),
               f"--http-port={http_port}", f"--grpc-port={grpc_port}", f"--metrics-port={metrics_port}"]
    return command, {**os.environ, "LD_LIBRARY_PATH": ":".join(libraries + ([path] if path else []))}


def _numpy_is_old() -> bool:
    import numpy
    return int(numpy.__version__.split(".")[0]) < 2


def main(arguments: list[str] | None = None) -> int:
    parser = CommandParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="the model repository; FOLDER/NAME is written")
    parser.add_argument("--model", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--name", default="gpt", help="the model's name on the server (gpt)")
    parser.add_argument("parameters", nargs="*", metavar="key=value", help="parameter, such as max_batch_size=64")
    parser.add_argument("--run", action="store_true", help="start the server afterwards, on 127.0.0.1")
    for kind, port in (("http", 8000), ("grpc", 8001), ("metrics", 8002)):
        parser.add_argument(f"--{kind}-port", type=int, default=port, help=f"({port})")
    given = parser.parse_intermixed_args(arguments)
    wrong = [text for text in given.parameters if "=" not in text]
    if wrong:
        parser.error(f"{wrong[0]!r} is not key=value")
    parameters = {"gpt_model_path": str(given.model.resolve()),
                  **dict(text.split("=", 1) for text in given.parameters)}
    folder = given.folder.resolve()
    try:
        write_repository(folder, given.name, parameters)
    except ValueError as error:             # SettingError, ConfigError
        parser.error(str(error))
    except OSError as error:
        parser.error(f"{folder / given.name} cannot be written ({error.strerror}); expected a folder that can be made "
                     "or written; name another")
    print(f"wrote {folder / given.name}")
    if given.run:
        command, environment = server_command(folder, given.http_port, given.grpc_port, given.metrics_port)
        sys.stdout.flush()
        os.execve(command[0], command, environment)
    return 0


if __name__ == "__main__":
    raise SystemExit(reported("make_repository", main))
