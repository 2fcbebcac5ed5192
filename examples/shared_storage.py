"""A KV connector over a shared folder: what one engine has computed of a prompt, another one loads.

    --kv-transfer-config '{"kv_connector": "SharedStorage", "kv_connector_module_path": "shared_storage",
        "kv_role": "kv_both", "kv_connector_extra_config": {"folder": "/var/kv"}}'

with this file's folder in PYTHONPATH. `kv_producer` stores, `kv_consumer` loads, `kv_both` does both.

- A *block* of a prompt is named by the hash of all that its KV depends on: the tokens up to its end, images among them,
  adapter, model, and how the model is split. So any common beginning of two prompts is found, in whole blocks.
- Each rank writes a file per block, with its own layers and heads, aside and then renames it: a file is whole or not
  there. A block is there once every rank's file is. It is stored with the step that completes it: prompts may be cut.
- A file that cannot be loaded is reported as an invalid block, and `kv_load_failure_policy` says what becomes of the
  request. A damaged file is removed. A file that cannot be written is a block that is not there.
- What a step loads is trusted when every rank has loaded it. Until then nothing is stored of requests that hold those
  blocks: what was computed from a block that failed to load must not be stored under its prompt's name.
- A producer's answer has `kv_transfer_params` {"stored_tokens": N}, the length of what is stored of the prompt. With a
  request it says how much is loaded at most: 0 to compute all. Without it, all that is there is loaded.

Both engines need the same sizes (pipeline, tensor parallel, block) and weights: a folder is for one set of weights.
Nothing is evicted: remove old files whenever you like. Models with one kind of attention only.
"""

import json
import logging
import uuid
from array import array
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorWorkerMetadata,
)

log = logging.getLogger(__name__)
Blocks = list[tuple[str, int]]
"""Names of blocks of prompts, and the ids of the KV blocks that they are loaded into or stored from."""


class Store:
    """The files. One per block and rank, tensors by layer.

    Args:
        folder: is made if it is not there.
        ranks: how many files make a block.
    """

    def __init__(self, folder: Path, ranks: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._ranks = folder, ranks

    def path(self, name: str, rank: int) -> Path:
        """Where a rank's part of a block is."""
        return self._folder / f"{name}.{rank}.safetensors"

    def has(self, name: str) -> bool:
        """Whether every rank's part is there."""
        return all(self.path(name, rank).exists() for rank in range(self._ranks))

    def save(self, name: str, rank: int, layers: Mapping[str, torch.Tensor]) -> None:
        """Write a rank's part, unless it is there.

        Raises:
            OSError: it could not be written; nothing of it is left.
        """
        path = self.path(name, rank)
        if path.exists():
            return
        aside = path.with_suffix(f".{uuid.uuid4().hex}")
        try:
            aside.write_bytes(save(dict(layers)))
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)

    def load(self, name: str, rank: int, into: Mapping[str, torch.Tensor]) -> bool:
        """Read a rank's part into its layers. Returns whether that was possible; if not, no layer is touched."""
        path = self.path(name, rank)
        try:
            found = load_file(path)
            shapes = {layer: (tensor.shape, tensor.dtype) for layer, tensor in found.items()}
            if shapes != {layer: (tensor.shape, tensor.dtype) for layer, tensor in into.items()}:
                raise SafetensorError("other layers or shapes than this engine's")
        except SafetensorError as error:
            log.warning("%s is removed, it is damaged: %s", path, error)
            path.unlink(missing_ok=True)
            return False
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            return False
        for layer, tensor in found.items():
            into[layer].copy_(tensor)
        return True


@dataclass
class Transfers(KVConnectorMetadata):
    """What the ranks shall do with a step. `number` tells steps that load apart."""

    number: int = 0
    loads: Blocks = field(default_factory=list)
    saves: Blocks = field(default_factory=list)


@dataclass
class Loaded(KVConnectorWorkerMetadata):
    """How many ranks have ended the loads of each step, well or not."""

    ranks: Counter[int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> "Loaded":
        """Both ranks' words."""
        assert isinstance(other, Loaded)
        return Loaded(self.ranks + other.ranks)


@dataclass
class Prompt:
    """The scheduler's side of one request."""

    request: Any
    names: list[str]  # of the prompt's whole blocks
    first: int = 0  # the first block that is not in the engine's own cache
    stored: int = 0  # blocks whose storing has been asked for


class SharedStorage(KVConnectorBase_V1):
    """The connector: vLLM makes one beside the scheduler and one in every rank."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        if len(kv_cache_config.kv_cache_groups) > 1:
            raise ValueError("SharedStorage is for models with one kind of attention: this one has several")
        model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
        sizes = (parallel.pipeline_parallel_size, parallel.tensor_parallel_size)
        of_model = (model.model, model.revision, model.dtype, model.quantization)
        self._root = json.dumps((*of_model, cache.cache_dtype, cache.block_size, sizes), default=str)
        self._block_size: int = cache.block_size
        self._ranks = sizes[0] * sizes[1]
        self._store = Store(Path(self._kv_transfer_config.get_from_extra_config("folder", "/tmp/kv")), self._ranks)
        # The scheduler's side.
        self._prompts: dict[str, Prompt] = {}
        self._loads: Blocks = []  # of the step being planned
        self._number = 0
        self._loading: dict[int, tuple[int, set[int]]] = {}  # by step: ranks that have not ended, KV blocks
        # A rank's side.
        self._rank: int = parallel.rank
        self._caches: dict[str, torch.Tensor] = {}
        self._computed: set[str] = set()  # layers, in this step
        self._failed: set[int] = set()

    # -- beside the scheduler ----------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        """Name the blocks of its prompt."""
        self._prompts[request.request_id] = Prompt(request, self._names(request))

    def _names(self, request: Any) -> list[str]:
        tokens, size = request.prompt_token_ids, self._block_size
        if tokens is None or request.prompt_embeds is not None:
            return []  # embeddings have no name
        lora = request.lora_request
        adapter = None if lora is None else (lora.lora_name, lora.lora_path)
        name, names = json.dumps((self._root, adapter, request.cache_salt)), []
        for start in range(0, len(tokens) - size + 1, size):
            end = start + size
            media = [
                (feature.identifier, feature.mm_position.offset)
                for feature in request.mm_features
                if feature.mm_position.offset < end and feature.mm_position.offset + feature.mm_position.length > start
            ]
            digest = sha256(json.dumps((name, media)).encode())
            digest.update(array("q", tokens[start:end]).tobytes())
            name = digest.hexdigest()
            names.append(name)
        return names

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """How many tokens, beyond those in the engine's own cache, are there; one token at least must be computed."""
        if not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        prompt = self._prompts[request.request_id]
        prompt.first = first = num_computed_tokens // self._block_size
        end = first
        limit: Any = (request.kv_transfer_params or {}).get("stored_tokens")  # whatever the client has sent
        tokens = len(request.prompt_token_ids or ()) - 1
        last = min(len(prompt.names), (min(tokens, limit) if isinstance(limit, int) else tokens) // self._block_size)
        while end < last and self._store.has(prompt.names[end]):
            end += 1
        return (end - first) * self._block_size, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """The scheduler has made room for what was found: load it with this step."""
        if num_external_tokens == 0:
            return
        prompt = self._prompts[request.request_id]
        part = slice(prompt.first, prompt.first + num_external_tokens // self._block_size)
        self._loads += zip(prompt.names[part], blocks.get_block_ids()[0][part], strict=True)

    def build_connector_meta(self, scheduler_output: Any) -> Transfers:
        """What was to be loaded, and the blocks that this step completes. Called once per step."""
        loads, self._loads = self._loads, []
        if loads:
            self._number += 1
            self._loading[self._number] = self._ranks, {block for _, block in loads}
        return Transfers(self._number, loads, self._completed(scheduler_output))

    def _completed(self, scheduler_output: Any) -> Blocks:
        """Blocks of prompts that are computed when this step is, and whose storing has not been asked for."""
        saves: Blocks = []
        if not self._kv_transfer_config.is_kv_producer:
            return saves
        doubtful = set().union(*(blocks for _, blocks in self._loading.values()))
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            prompt = self._prompts[request_id]
            end = min((prompt.request.num_computed_tokens + tokens) // self._block_size, len(prompt.names))
            if prompt.stored >= end:
                continue
            (table,) = scheduler_output.kv_connector_block_state.get_block_ids(request_id)
            if doubtful.isdisjoint(table):
                part = slice(prompt.stored, end)
                saves += zip(prompt.names[part], table[part], strict=True)
                prompt.stored = end
        return saves

    def update_connector_output(self, connector_output: Any) -> None:
        """Ranks have loaded. Invalid blocks are the scheduler's own business."""
        loaded = connector_output.kv_connector_worker_meta
        for number, ranks in loaded.ranks.items() if loaded is not None else ():
            left, blocks = self._loading.pop(number)
            if left > ranks:
                self._loading[number] = left - ranks, blocks

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Nothing is under way: what was to be stored of it is stored within its steps."""
        prompt = self._prompts.pop(request.request_id, None)
        if prompt is None or not self._kv_transfer_config.is_kv_producer:
            return False, None
        return False, {"stored_tokens": prompt.stored * self._block_size}

    # -- in every rank -----------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Caches by layer: [KV block, ...]."""
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Load what the forward pass needs; vLLM calls this after it when there is nothing to load."""
        for name, block in self._transfers().loads:
            into = {layer: cache[block] for layer, cache in self._caches.items()}
            if not self._store.load(name, self._rank, into):
                self._failed.add(block)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """All is loaded before the first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Note that the layer was computed. It is stored with the others."""
        self._computed.add(layer_name)

    def wait_for_save(self) -> None:
        """Store after the forward pass. vLLM calls this after a failed one too: not every layer was computed then."""
        saves = self._transfers().saves if self._computed >= self._caches.keys() else []
        self._computed.clear()
        for name, block in saves:
            layers = {layer: cache[block].cpu().clone() for layer, cache in self._caches.items()}
            try:
                self._store.save(name, self._rank, layers)
            except OSError as error:
                log.warning("block %s is not stored: %s", name, error)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """KV blocks that could not be loaded in this step."""
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> Loaded | None:
        """The loads of this step have ended."""
        transfers = self._transfers()
        return Loaded(Counter({transfers.number: 1})) if transfers.loads else None

    def _transfers(self) -> Transfers:
        transfers = self._get_connector_metadata()
        assert isinstance(transfers, Transfers)
        return transfers
