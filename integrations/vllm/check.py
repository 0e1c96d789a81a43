"""The connector against the interface of vLLM's source, with two processes.

    git clone --depth 1 https://github.com/vllm-project/vllm vllm-source
    PYTHONPATH=. python -m integrations.vllm.check vllm-source

Only the file of the interface is imported; what it imports of vLLM and PyTorch is replaced.
"""

import importlib.util
import inspect
import multiprocessing
import pathlib
import secrets
import sys
import tempfile
import unittest.mock
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from integrations.vllm.engine import Config, Engine, cache_of

_INTERFACE = "vllm.distributed.kv_transfer.kv_connector.v1.base"


def import_interface(source: str) -> Any:
    """The module of KVConnectorBase_V1, from a clone or an unpacked wheel."""
    file = pathlib.Path(source, *_INTERFACE.split(".")).with_suffix(".py")
    for node in _imported(file.read_text()):
        parts = node.split(".")
        for i in range(1, len(parts) + 1):
            sys.modules.setdefault(".".join(parts[:i]), unittest.mock.MagicMock())
    spec = importlib.util.spec_from_file_location(_INTERFACE, file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[_INTERFACE] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _imported(text: str) -> list[str]:
    lines = [line.split() for line in text.splitlines()]
    found = [words[1] for words in lines if words[:1] in (["from"], ["import"])]
    parents = _INTERFACE.rpartition(".")[0]
    return [parents, *(name for name in found if name.split(".")[0] in ("vllm", "torch"))]


def check_signatures(base: type, connector: type) -> int:
    """Every method takes what vLLM passes. Returns their number."""
    assert not getattr(connector, "__abstractmethods__", None), connector.__abstractmethods__
    own = [name for name, value in vars(connector).items() if inspect.isfunction(value) and not name.startswith("_")]
    own.remove("register_runner")  # tpu-inference's
    for name in own:
        theirs, ours = (list(inspect.signature(getattr(of, name)).parameters) for of in (base, connector))
        assert ours == theirs, f"{name} takes {ours}, vLLM passes {theirs}"
    return len(own)


def prefill(source: str, folder: str, prompts: Any) -> None:
    """The prefill engine: gets prompts, gives what the proxy hands on."""
    interface = import_interface(source)
    from integrations.vllm.connector import JaxcommConnector

    jax.config.update("jax_num_cpu_devices", 4)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P(None, None, "model"))
    options = {"secret_file": f"{folder}/secret", "address_file": f"{folder}/address"}
    engine = Engine(
        JaxcommConnector, interface.KVConnectorRole, Config("kv_producer", 4, options, "prefill"), 32, sharding
    )
    while (prompt := prompts.recv()) is not None:
        request = engine.request(f"prefill-{len(prompt)}", prompt)
        prompts.send(engine.prefill(request))
        assert len(engine.free) == 32
    engine.close()


def main() -> None:
    source = sys.argv[1]
    interface = import_interface(source)
    from integrations.vllm.connector import JaxcommConnector

    count = check_signatures(interface.KVConnectorBase_V1, JaxcommConnector)
    print(f"{count} methods have the parameters of {interface.KVConnectorBase_V1.__name__}; none is missing")
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "secret").write_text(secrets.token_hex(16))
        prompts, other = context.Pipe()
        process = context.Process(target=prefill, args=(source, folder, other))
        process.start()
        other.close()
        try:
            decode(interface, JaxcommConnector, folder, prompts, process)
        finally:
            process.kill()
            process.join()


def decode(interface: Any, connector: type, folder: str, prompts: Any, process: Any) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    sharding = NamedSharding(Mesh(np.array(jax.devices()), ("model",)), P(None, None, "model"))
    options = {"secret_file": f"{folder}/secret", "timeout_s": 10.0}
    engine = Engine(connector, interface.KVConnectorRole, Config("kv_consumer", 8, options, "decode"), 16, sharding)

    def check(name: str, prompt: list[int], local_tokens: int, params: Any, loads: int) -> set[int]:
        request = engine.request(name, prompt, params)
        loaded, invalid = engine.load(request, local_tokens)
        assert loaded == loads, f"{name}: {loaded} tokens were loaded, not {loads}"
        for layer, got in enumerate(engine.blocks(request.blocks, len(prompt))):
            np.testing.assert_array_equal(got, cache_of(prompt, layer), err_msg=f"{name} layer {layer}")
        engine.free += request.blocks
        return invalid

    def ask(prompt: list[int]) -> Any:
        prompts.send(prompt)
        return prompts.recv()

    long, short = list(range(3, 32)), [5, 4, 3]
    assert not check("long", long, 0, ask(long), loads=29) and not check("short", short, 0, ask(short), loads=3)
    print("4 devices, blocks of 4 tokens -> 2 devices, blocks of 8: caches equal NumPy's")
    assert not check("prefix", long, 16, ask(long), loads=13)
    assert not check("all", long[:16], 16, ask(long[:16]), loads=0)
    print("a prefix of 2 blocks, then all blocks are here before: the rest is loaded, caches equal NumPy's")
    params = ask(long)
    process.kill()
    process.join()
    invalid = check("dead", long, 0, params, loads=0)
    assert len(invalid) == 4, invalid
    print("the prefill process was killed: 4 invalid blocks, computed again, caches equal NumPy's")
    engine.close()


if __name__ == "__main__":
    main()
