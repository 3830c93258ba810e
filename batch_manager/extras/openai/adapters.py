"""LoRA adapters of the OpenAI server: those that it starts with, and routes with which clients load and unload others.

Needs starlette: the extra `server`.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from ...adapters import cache_for
from ...aio.adapter_names import NameInUseError
from ...config import PeftCacheConfig
from ...errors import BatchManagerError, ConfigError
from .errors import OpenAIError, refused, without_paths
from .json_object import JsonObject, parsed_json
from .responses import body_of, error_response
from .service import OpenAIService

LONGEST_NAME = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterOptions:
    """The options of the server about adapters.

    modules         name -> folder of each adapter that is loaded at the start
    most_on_device, most_on_host   number of adapters of the largest rank for which there is memory on the device and in
                    the host's cache; 0: the engine's default sizes, which are bytes
    largest_rank    largest rank of an adapter
    root            folder below which clients may load adapters at run time; None: they may load none

    Raises ConfigError if the root is not a folder.
    """

    modules: Mapping[str, str] = field(default_factory=dict)
    most_on_device: int = 0
    most_on_host: int = 0
    largest_rank: int = 64
    root: str | None = None

    def __post_init__(self) -> None:
        if self.root is not None and not os.path.isdir(self.root):
            raise ConfigError(f"the root of adapters is {self.root!r}", "expected an existing folder", "create it")

    @classmethod
    def of(cls, modules: Sequence[str] = (), **others: Any) -> "AdapterOptions":
        """Return options whose modules are given as NAME=FOLDER. Raises ConfigError for other texts."""
        folders: dict[str, str] = {}
        for module in modules:
            name, _, folder = module.partition("=")
            if not name or not folder or "," in name or name in folders:
                raise ConfigError(f"an adapter is given as {module!r}",
                                  "expected NAME=FOLDER, each name once and without a comma", "")
            folders[name] = folder
        return cls(modules=folders, **others)

    def cache(self, model: str) -> PeftCacheConfig:
        """Return the engine's configuration for this model, whose configuration is read."""
        return cache_for(model, self.largest_rank, self.most_on_device, self.most_on_host)

    async def load(self, service: OpenAIService) -> None:
        """Load the adapters of the start. Raises the errors of AsyncEngine.load_adapter."""
        for name, folder in self.modules.items():
            if service.is_base(name):
                raise NameInUseError(f"the adapter name {name!r} is that of the model", "a name stands for one model",
                                     "choose another name")
            await service.engine.load_adapter(name, folder)

    def routes(self) -> Sequence[Route]:
        """Return the routes with which clients load and unload adapters; none without a root."""
        if self.root is None:
            return ()

        async def load(request: Request) -> Response:
            return await _answered(request, self._load)

        async def unload(request: Request) -> Response:
            return await _answered(request, self._unload)

        return (Route("/v1/load_lora_adapter", load, methods=["POST"]),
                Route("/v1/unload_lora_adapter", unload, methods=["POST"]))

    async def _load(self, service: OpenAIService, body: JsonObject) -> str:
        name, path = _name(body), body.take("lora_path", str)
        replaces = body.take("load_inplace", bool, False)
        body.check_rest()
        folder = self._below_root(path)
        if service.is_base(name):
            raise OpenAIError(409, f"lora_name: {name!r} is the name of the model; choose another name", "lora_name",
                              "name_in_use")
        try:
            await service.engine.load_adapter(name, folder, replaces=replaces)
        except NameInUseError as error:
            raise OpenAIError(409, f"lora_name: {error.fact}; unload it first, or set load_inplace", "lora_name",
                              "name_in_use") from None
        except ConfigError as error:                      # the folder: file and field, without the path of the root
            text = str(error).replace(f"{folder}{os.sep}", "").replace(str(folder), "the folder")
            raise OpenAIError(400, f"lora_path: {without_paths(text)}", "lora_path", "invalid_adapter") from None
        return f"Success: LoRA adapter '{name}' added successfully."

    def _below_root(self, path: str | None) -> Path:
        """Return the folder at `path`, which may begin with the root, or with a folder in it. Raises OpenAIError."""
        if not path:
            raise refused("lora_path", "it is missing; expected the path of a folder below the server's --lora-root")
        assert self.root is not None
        root = Path(self.root).resolve()
        try:
            folder = (root / path).resolve()
            is_below = folder.is_relative_to(root) and folder != root and folder.is_dir()
        except (OSError, ValueError, RuntimeError):       # a null character, a name too long, links in a circle
            is_below = False
        if not is_below:
            raise refused("lora_path", f"got {path[:200]!r}; expected an existing folder below the server's "
                          "--lora-root")
        return folder

    async def _unload(self, service: OpenAIService, body: JsonObject) -> str:
        name = _name(body)
        body.take("lora_int_id", int)                     # vLLM's clients may send it; the name decides
        body.check_rest()
        try:
            await service.engine.unload_adapter(name)
        except ConfigError:
            raise OpenAIError(404, f"lora_name: there is no adapter {name!r}", "lora_name", "model_not_found") from None
        return f"Success: LoRA adapter '{name}' removed successfully."


async def _answered(request: Request, act) -> Response:
    service = request.app.state.service
    try:
        if service.is_draining:
            raise OpenAIError(503, "the server is shutting down", code="shutdown")
        return PlainTextResponse(await act(service, JsonObject(parsed_json(await body_of(request, service)))))
    except OpenAIError as error:
        return error_response(error)
    except BatchManagerError as error:
        return error_response(OpenAIError.of(error))
    except ClientDisconnect:
        return Response(status_code=499)


def _name(body: JsonObject) -> str:
    name = body.take("lora_name", str)
    if not name or len(name) > LONGEST_NAME or not name.isprintable() or "," in name:
        raise refused("lora_name", f"expected a name of 1 to {LONGEST_NAME} printable characters, without a comma")
    return name
