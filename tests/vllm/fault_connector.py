"""A KV connector that does what a test says: its scheduler's side, and one rank's side, late, wrong or failing.

The scheduler's side keeps a script for each request. Ranks are told of loads and sends by the connector's metadata, and
report with their answers to steps and to what is sent apart from the steps, as vLLM's workers do.
"""

from collections import defaultdict
from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from tests.vllm.virtual_engine import BLOCK


@dataclass(frozen=True)
class Fault:
    """What one rank does with its part of a transfer.

    Attributes:
        calls: how many further calls pass before it reports the end.
        takes_s: virtual seconds that must have passed, too.
        never: it reports nothing until the ranks are released.
        twice: it reports the end in the next call again.
        fails: "blocks" or "request": how it reports that loading failed. What fails by blocks is told at once.
        unknown: what it reports besides of a request that nobody knows: "sent", "received" or "failed".
        raises: it raises instead.
    """

    calls: int = 0
    takes_s: float = 0.0
    never: bool = False
    twice: bool = False
    fails: str = ""
    unknown: str = ""
    raises: bool = False


GOOD = Fault()


@dataclass(frozen=True)
class Load:
    """KV that the connector offers: `tokens` at most, and what each rank does that is no good one."""

    tokens: int = 3 * BLOCK
    apart: bool = True  # from the steps, vLLM's "async"
    faults: dict = field(default_factory=dict)


@dataclass
class Script:
    """What the connector does with one request.

    Attributes:
        unknowing: how often it does not know yet what it has to offer.
        loads: what it offers, one after another: when the request begins, and when it begins again.
        send: what ranks do with the send after the end, by rank; None: nothing is sent.
        send_aborted: whether aborted requests are sent too.
    """

    unknowing: int = 0
    loads: list = field(default_factory=list)
    send: dict | None = None
    send_aborted: bool = False


@dataclass
class Told(KVConnectorMetadata):
    """What ranks are told: loads as (request, blocks, Load), sends as (request, faults)."""

    loads: list
    sends: list


class FaultConnector(KVConnectorBase_V1):
    """The scheduler's side.

    Attributes:
        scripts: by request.
        busy: blocks that ranks write ("load") or read ("send"), by (rank, kind, request): from when the connector got
            them until the rank reports.
    """

    requires_kv_delivery = False

    def __init__(self, *args, **named):
        super().__init__(*args, **named)
        self._ranks = range(self._vllm_config.parallel_config.pipeline_parallel_size)
        self.reset()

    def reset(self):
        self.scripts, self.busy, self._receiving = defaultdict(Script), {}, set()
        self._told = Told([], [])

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        script = self.scripts[request.request_id]
        if script.unknowing:
            script.unknowing -= 1
            return None, False
        if not script.loads or not self._kv_transfer_config.is_kv_consumer:
            return 0, False
        load = script.loads[0]
        most = request.num_tokens - (not load.apart)  # a step must have something to compute
        tokens = min(load.tokens, most) // BLOCK * BLOCK
        return tokens, load.apart and tokens > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        load = self.scripts[request.request_id].loads.pop(0)
        written = blocks.get_block_ids()[0][: num_external_tokens // BLOCK]
        self._told.loads.append((request.request_id, written, load))
        if load.apart:
            self._receiving.add(request.request_id)
            self._keep_busy("load", request.request_id, written)

    def build_connector_meta(self, scheduler_output):
        told, self._told = self._told, Told([], [])
        return told

    def update_connector_output(self, connector_output):
        self._receiving -= connector_output.finished_recving or set()

    def request_finished(self, request, block_ids):
        script = self.scripts[request.request_id]
        ended = request.status == RequestStatus.FINISHED_LENGTH_CAPPED or script.send_aborted
        if script.send is None or not ended or not self._kv_transfer_config.is_kv_producer:
            return False, None
        self._told.sends.append((request.request_id, script.send))
        if request.request_id not in self._receiving:  # else the end of that frees the blocks
            self._keep_busy("send", request.request_id, block_ids)
        return True, {"sent": len(block_ids)}

    def _keep_busy(self, kind, request_id, blocks):
        self.busy.update({(rank, kind, request_id): frozenset(blocks) for rank in self._ranks})

    # Of the worker's side nothing is used.
    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


class Worker:
    """One rank's side.

    Attributes:
        injected: reports made that must change nothing.
        vain: reports of sends whose blocks the end of a load frees: the request may be gone by then, or not yet.
        failed: requests of which it said that loading failed.
    """

    def __init__(self, rank, busy, clock):
        self.rank, self._busy, self._clock = rank, busy, clock
        self._open = []  # [kind, request, calls left, when it may be done, fault]
        self._again = []
        self.released = False
        self.injected, self.vain, self.failed = 0, 0, set()

    def act(self, work):
        """A step, or what is sent apart from steps. Returns what it reports. Raises OSError when a fault says so."""
        sent, received, failed, invalid = ids = set(), set(), set(), set()
        for kind, request_id in self._again:
            (sent if kind == "send" else received).add(request_id)
            self.injected += 1
        self._again = []
        for request_id, blocks, load in work.kv_connector_metadata.loads:
            fault = load.faults.get(self.rank, GOOD)
            self._begin("load" if load.apart else None, request_id, fault, ids)
            if fault.fails == "blocks" or (fault.fails and not load.apart):
                invalid.update(blocks[len(blocks) // 2 :])
                self.failed.add(request_id)
        for request_id, faults in work.kv_connector_metadata.sends:
            self._begin("send", request_id, faults.get(self.rank, GOOD), ids)
        for transfer in list(self._open):
            kind, request_id, calls, ready_s, fault = transfer
            if calls > 0 or self._clock() < ready_s or (fault.never and not self.released):
                transfer[2] -= 1
                continue
            self._open.remove(transfer)
            self.vain += self._busy.pop((self.rank, kind, request_id), None) is None
            (sent if kind == "send" else received).add(request_id)
            if fault.fails == "request" and kind == "load":
                failed.add(request_id)
                self.failed.add(request_id)
            if fault.twice:
                self._again.append((kind, request_id))
        return KVConnectorOutput(
            finished_sending=sent, finished_recving=received, failed_recving=failed, invalid_block_ids=invalid
        )

    def _begin(self, kind, request_id, fault, ids):
        sent, received, failed, _ = ids
        if fault.raises:
            raise OSError("the storage is gone")
        if kind is not None:
            self._open.append([kind, request_id, fault.calls, self._clock() + fault.takes_s, fault])
        if fault.unknown:
            nobody = f"nobody of {request_id}"
            (sent if fault.unknown == "sent" else received).add(nobody)
            if fault.unknown == "failed":
                failed.add(nobody)
            self.injected += 1 + (fault.unknown == "failed")
