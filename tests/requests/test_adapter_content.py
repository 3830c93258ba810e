"""The tensors of an adapter: their parts, their digest, and the errors that name tensor, row, value and range."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from batch_manager.adapter_values import MODULE_NAMES, AdapterContent, AdapterInfo, AdapterModules
from batch_manager.errors import InvalidRequestError, RequestTooLargeError
from batch_manager.requests.adapter_content import checked_adapter, read_adapter
from batch_manager.requests.adapter_store import AdapterStore

MODULES = AdapterModules({"attn_qkv": ((4, 8), (4, 8)), "attn_q": ((4, 4), (4, 4)), "attn_dense": ((4, 4), (4, 4)),
                          "mlp_4h_to_h": ((6, 4), None)})
WIDEST = 36      # attn_qkv with rank 3


def tensors(*rows, width=WIDEST, **changed):
    """Return the two tensors with these rows of lora_config, and different weights in each row."""
    weights = np.arange(len(rows) * width, dtype=np.float32).reshape(len(rows), width) / 64
    return {"lora_weights": weights, "lora_config": np.array(rows, np.int32)} | changed


def content(given, max_adapter_size=4):
    return checked_adapter(read_adapter(given, 10_000), MODULES, max_adapter_size)


def test_the_parts_are_those_of_the_rows_in_every_dtype():
    given = tensors((4, 1, 2), (1, 0, 3), (6, 0, 1))
    weights = given["lora_weights"]
    plain = content(given)
    assert [(part.module, part.layer, part.size) for part in plain.parts] == [
        ("attn_q", 0, 3), ("mlp_4h_to_h", 0, 1), ("attn_dense", 1, 2)]
    dense = plain.parts[2]
    assert np.array_equal(dense.a, weights[0, :8].reshape(2, 4)) and np.array_equal(
        dense.b, weights[0, 8:16].reshape(4, 2))
    assert plain.num_pages == 3 and plain.num_bytes == 4 * (16 + 24 + 10)
    assert AdapterInfo.of(7, plain) == AdapterInfo(task_id=7, adapter_size=3, num_bytes=200, digest=plain.digest.hex(),
                                                   modules=("attn_q", "attn_dense", "mlp_4h_to_h"))
    half = content(given | {"lora_weights": weights.astype(np.float16)})
    brain = content(given | {"lora_weights": torch.tensor(weights)[None].bfloat16()})
    assert (half.dtype, brain.dtype, brain.parts[0].a.dtype) == ("float16", "bfloat16", np.uint16)
    assert np.array_equal((brain.parts[2].a.astype(np.uint32) << 16).view(np.float32), dense.a)
    assert len({plain.digest, half.digest, brain.digest}) == 3
    assert content(given | {"lora_weights": weights.tolist()}).digest == plain.digest
    assert content(given | {"lora_weights": weights.astype(float)}).digest == plain.digest


def test_what_follows_the_longest_row_is_not_copied():
    given = tensors((1, 0, 2), (4, 1, 2))
    long = np.lib.stride_tricks.as_strided(given["lora_weights"], (2, 2**44), (36 * 4, 4), writeable=False)
    read = read_adapter(given | {"lora_weights": long}, 2**62, (7, WIDEST))
    assert read.weights.shape == (2, WIDEST) and checked_adapter(read, MODULES, 4).digest == content(given).digest
    rows = np.broadcast_to(given["lora_config"][:1], (2**40, 3))
    weights = np.broadcast_to(given["lora_weights"][:1], (2**40, WIDEST))
    with pytest.raises(InvalidRequestError, match="1,099,511,627,776; the model has 7 projections"):
        read_adapter({"lora_config": rows, "lora_weights": weights}, 2**62, (7, WIDEST))


def test_the_digest_names_the_content_and_not_its_padding_or_order():
    given = tensors((1, 0, 2), (4, 1, 2))
    digest = content(given).digest
    padded = np.pad(given["lora_weights"], ((0, 0), (0, 3)), constant_values=np.nan)
    padded[:, 16:] = np.nan
    assert content({"lora_weights": padded[::-1], "lora_config": given["lora_config"][::-1]}).digest == digest
    assert content(given | {"lora_config": [[1, 0, 2, 0], [4, 1, 2, 0]]}).digest == digest
    changed = given["lora_weights"].copy()
    changed[1, 15] += 1
    others = [content(given | {"lora_weights": changed}), content(tensors((1, 1, 2), (4, 1, 2))),
              content(tensors((4, 0, 2), (4, 1, 2))), content(tensors((1, 0, 1), (4, 1, 2)))]
    assert len({digest, *(other.digest for other in others)}) == 5


@pytest.mark.parametrize("given, says", [
    (tensors(), "lora_config"),
    (tensors((1, 0, 2), (9, 0, 2)), r"row 1 of lora_config has module id 9 \(cross attention\).*1 \(attn_q\)"),
    (tensors((13, 0, 2)), r"row 0 .* module id 13 \(experts"),
    (tensors((22, 0, 2)), "module id 22;"),
    (tensors((-1, 0, 2)), "module id -1;"),
    (tensors((5, 0, 2)), r"module id 5 \(mlp_h_to_4h\)"),
    (tensors((1, 2, 2)), r"row 0 of lora_config has layer 2 for attn_q; .* layers 0\.\.1"),
    (tensors((1, -1, 2)), "has layer -1"),
    (tensors((6, 1, 2)), "has layer 1 for mlp_4h_to_h; .* the layers 0;"),
    (tensors((1, 0, 0)), r"row 0 of lora_config has adapter size 0; it must be in 1\.\.4.*leave the module out"),
    (tensors((1, 0, 2)) | {"lora_weights": np.ones((1, 16), np.int8)}, "lora_weights is of type int8"),
    (tensors((1, 0, 5)), "has adapter size 5"),
    (tensors((1, 0, 2), (4, 0, 2), (1, 0, 1)), "row 2 .* attn_q of layer 0, and row 0 has attn_q"),
    (tensors((0, 1, 2), (1, 1, 2)), "row 1 .* attn_q of layer 1, and row 0 has attn_qkv"),
    (tensors((1, 1, 2), (0, 1, 2)), "row 1 .* attn_qkv of layer 1, and row 0 has attn_q"),
    (tensors((0, 0, 3), width=WIDEST - 1), "row 0 of lora_weights has 35 elements; .* at least 36"),
    (tensors((1, 0, 2, 1)), "row 0 .* fourth column.* DoRA"),
    (tensors((1, 0)), "columns of lora_config is 2"),
    (tensors((1, 0, 2)) | {"lora_weights": np.zeros((2, WIDEST), np.float32)}, "rows of lora_weights is 2"),
    (tensors((1, 0, 2)) | {"lora_weights": np.full((1, 16), np.nan)}, "row 0 of lora_weights is not finite"),
    (tensors((1, 0, 2)) | {"lora_weights": torch.full((1, 16), torch.inf).bfloat16()}, "not finite"),
    (tensors((1, 0, 2)) | {"lora_weights": [[1e400] * 16]}, "not finite"),
    (tensors((1, 0, 2)) | {"lora_weights": [[10**400] * 16]}, "not finite"),
    (tensors((1, 0, 2)) | {"lora_weights": np.zeros((1, 3000), np.float32)}, "max_request_bytes"),
    (tensors((1, 0, 2)) | {"lora_weights": np.zeros(16, np.float32)}, "lora_weights has shape"),
    (tensors((1, 0, 2)) | {"lora_config": [[1.0, 0, 2]]}, "lora_config holds"),
    (tensors((1, 0, 2)) | {"lora_config": [[1, 0, 2**64]]}, "lora_config"),
    ({"lora_weights": np.zeros((1, 4))}, "tensors of an adapter are lora_weights"),
    ({}, "none"),
])
def test_a_wrong_adapter_is_refused_with_the_place_and_the_range(given, says):
    with pytest.raises(InvalidRequestError, match=says):
        content(given)


def test_the_modules_of_a_model():
    assert MODULES.num_layers == 2 and MODULES.num_module_layers == 5 and MODULES.page_elements == 16 + 16 + 10
    assert set(MODULES.only(("attn_q", "mlp_gate")).sizes) == {"attn_q"} and MODULES.only(None) is MODULES
    assert MODULE_NAMES.index("mlp_gate") == 7 and len(MODULE_NAMES) == 8


def test_an_adapter_that_no_step_can_bring_to_the_other_ranks_is_refused():
    store, content = AdapterStore(1000, 8, largest_bytes=100), AdapterContent(b"1", "float32", (), 101, 1)
    with pytest.raises(RequestTooLargeError, match="has 101 bytes; a step brings the other ranks .* at most 100; "):
        store.put(1, content)
    assert store.put(2, replace(content, num_bytes=100)) and store.used_bytes == 100
