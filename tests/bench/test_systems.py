"""Both systems are started alike; the differences are the ones named here."""

from pathlib import Path

from async_pp.bench import systems

MODEL = Path("/models/some")
BASE = {
    "PATH": "/bin",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "OMP_NUM_THREADS": "7",
    "GOMP_CPU_AFFINITY": "0",
    "HOME": "/home",
}


def words(system, pp=2):
    return systems.command(system, pp, MODEL, 1234)[2:]


def test_the_flags_are_the_same_but_for_executor_worker_and_what_a_loss_means():
    ours, theirs = words("async_pp"), words("vllm")
    assert ours[:3] == ["async_pp.serve", "--on-rank-loss", "exit"]
    assert theirs[0] == "vllm.entrypoints.launchers.api_server.entry"
    assert theirs[1:5] == [
        "--distributed-executor-backend",
        "mp",
        "--worker-cls",
        "async_pp.bench.peer_worker.BufferedWorker",
    ]
    assert ours[3:] == theirs[5:]


def test_what_both_are_told():
    flags = words("async_pp", pp=4)
    told = {name: flags[flags.index(name) + 1] for name in flags if name.startswith("--") and name != flags[-1]}
    assert told["--model"] == "/models/some"
    assert told["--port"] == "1234"
    assert told["--pipeline-parallel-size"] == "4"
    assert told["--dtype"] == "float32"
    assert told["--max-num-seqs"] == "512"
    assert "--enforce-eager" in flags


def test_the_environment_is_the_same_but_for_the_plugins():
    ours, theirs = (systems.environment(system, 2, BASE, [0, 1, 2, 3]) for system in ("async_pp", "vllm"))
    assert theirs.pop("VLLM_PLUGINS") == ""
    assert ours == theirs
    assert ours["VLLM_CPU_OMP_THREADS_BIND"] == "0,1|2,3"
    assert (ours["HF_HUB_OFFLINE"], ours["GLOO_SOCKET_IFNAME"]) == ("1", "lo")


def test_settings_of_the_shell_for_vllm_and_openmp_are_dropped():
    got = systems.environment("vllm", 1, BASE, [0, 1])
    assert (got["PATH"], got["HOME"]) == ("/bin", "/home")
    assert not {"VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS", "GOMP_CPU_AFFINITY"} & set(got)
    assert got["VLLM_CPU_OMP_THREADS_BIND"] == "0,1"


def test_ranks_share_cores_when_there_are_too_few():
    assert systems.environment("vllm", 2, BASE, [3])["VLLM_CPU_OMP_THREADS_BIND"] == "3|3"
