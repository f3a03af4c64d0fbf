# SPDX-License-Identifier: Apache-2.0
"""The command blocks of the documents that this project was made from, verbatim, and what becomes of each.

``000`` is a deployment guide, ``002`` a build-and-run post, ``004`` a guide to the store's connector; ``001``
and ``003`` have no commands. A block is run by a test here, by one in ``tests/vllm`` where it starts vLLM, by
``scripts/test-wheel`` where it installs our wheel, or has the reason why it is not run. Commands that install
what is not ours are shortened. ``python -m tests.seeds.blocks`` prints the table; a test compares it with the
documents where they are at hand (``MOONCAKE_SEED_DOCUMENTS`` names their folder).
"""

from __future__ import annotations

from dataclasses import dataclass

HERE, VLLM, WHEEL = "tests/seeds/test_commands.py", "tests/vllm/test_seeds.py", "scripts/test-wheel"

OTHERS = "installs or builds what is not ours"
BY_HAND = "shows or ends processes of the machine; ours are found by these names"
SYSTEM = "changes the machine; any directory will do instead"


@dataclass(frozen=True)
class Block:
    """One command block."""

    seed: str
    name: str
    text: str
    run_by: str = ""
    why_not: str = ""
    """Reason, for a block that no test runs."""


def _vllm_000(role: str, connector: str, options: str, flags: str, port: int, before: str = "") -> str:
    return f"""{before}export VLLM_KV_TRANSFER_CONFIG='{{
  "kv_connector": "{connector}",
  "kv_role": "{role}",
  "kv_connector_extra_config": {{
    {options}
  }}
}}'

python -m vllm.entrypoints.openai.api_server \\
  --model meta-llama/Llama-3.1-70B-Instruct \\
  --dtype fp8 \\
{flags}  --kv-transfer-config "$VLLM_KV_TRANSFER_CONFIG" \\
  --port {port}
"""


_ONE_RANK = "  --tensor-parallel-size 1 \\\n"
_LIMITS = "  --gpu-memory-utilization 0.92 \\\n  --max-model-len 32768 \\\n"
_STORE = '"mooncake_store_addr": "<STORE_NODE_IP>:50051"'
_STORE_IP = """"mooncake_store_addr": "'"$STORE_IP"':50051\""""
_STEP = "STORE_IP=<DECODE_NODE_IP>\n\n"


def _vllm_002(role: str, port: int, log: str, device: str, before: str = "") -> str:
    return f"""{before}{device}=0 \\
MOONCAKE_CONFIG_PATH=mooncake.json \\
python3 -m vllm.entrypoints.openai.api_server \\
--model /home/vllm/Qwen2.5-7B-Instruct-GPTQ-Int4 \\
--port {port} \\
--max-model-len 10000 \\
--gpu-memory-utilization 0.4 \\
--kv-transfer-config '{{"kv_connector":"MooncakeStoreConnector","kv_role":"{role}"}}' \\
> logs/{log}-0.txt 2>&1 &
"""


def _vllm_004(device: str, port: int, role: str) -> str:
    variables = f"{device}MOONCAKE_CONFIG_PATH=./mooncake.json VLLM_USE_V1=0"
    return f"""{variables} python3 -m vllm.entrypoints.openai.api_server \\
    --model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 \\
    --port {port} \\
    --max-model-len 10000 \\
    --gpu-memory-utilization 0.8 \\
    --kv-transfer-config '{{"kv_connector":"MooncakeStoreConnector","kv_role":"{role}"}}'
"""


def _add_004(kind: str, port: int) -> str:
    return f"""curl -X POST "http://localhost:8000/instances/add" \\
  -H "Content-Type: application/json" \\
  -H "X-API-Key: $ADMIN_API_KEY" \\
  -d '{{"type": "{kind}", "instance": "localhost:{port}"}}'
"""


def _file_004(protocol: str, device: str) -> str:
    return f"""{{
    "local_hostname": "192.168.0.137",
    "metadata_server": "etcd://192.168.0.137:2379",
    "protocol": "{protocol}",
    "device_name": "{device}",
    "master_server_address": "192.168.0.137:50001"
}}
"""


SAME_COMMAND = (
    "is the command of another block, with another port and device; eight models do not fit a laptop"
)

BLOCKS = [
    # 000: a deployment guide
    Block("000", "install", "pip install mooncake-transfer-engine vllm\n", WHEEL),
    Block("000", "version", 'python -c "import mooncake; print(mooncake.__version__)"\n', HERE),
    Block("000", "vllm version", 'python -c "import vllm; print(vllm.__version__)"\n', VLLM),
    Block(
        "000",
        "mount",
        "sudo mkdir -p /mnt/nvme/mooncake\nsudo mount /dev/nvme0n1 /mnt/nvme\n",
        why_not=SYSTEM,
    ),
    Block(
        "000",
        "daemon",
        """mooncaked \\
  --port 50051 \\
  --capacity-hbm 0 \\
  --capacity-dram 256 \\
  --capacity-nvme 2000 \\
  --nvme-path /mnt/nvme/mooncake \\
  &> mooncaked.log &
""",
        HERE,
    ),
    Block(
        "000",
        "daemon status",
        """grpc_cli call <STORE_NODE_IP>:50051 \\
  MooncakeStoreService.GetPoolStatus \\
  "" --channel_creds_type=insecure
""",
        HERE,
    ),
    Block(
        "000",
        "direct prefill",
        _vllm_000(
            "kv_producer", "MooncakeConnector", '"decode_addr": "<DECODE_NODE_IP>:8201"', _ONE_RANK, 8200
        ),
        VLLM,
    ),
    Block(
        "000",
        "direct decode",
        _vllm_000("kv_consumer", "MooncakeConnector", '"prefill_addr": "<PREFILL_NODE_IP>:8200"', "", 8201),
        VLLM,
    ),
    Block(
        "000",
        "store prefill",
        _vllm_000("kv_producer", "MooncakeStoreConnector", _STORE, _ONE_RANK, 8200),
        VLLM,
    ),
    Block("000", "store decode", _vllm_000("kv_consumer", "MooncakeStoreConnector", _STORE, "", 8201), VLLM),
    Block(
        "000",
        "step 4",
        _vllm_000("kv_producer", "MooncakeStoreConnector", _STORE_IP, _LIMITS, 8200, _STEP),
        VLLM,
    ),
    Block(
        "000",
        "step 5",
        _vllm_000("kv_consumer", "MooncakeStoreConnector", _STORE_IP, _LIMITS, 8201, _STEP),
        VLLM,
    ),
    Block(
        "000",
        "step 6",
        """curl http://<PREFILL_NODE_IP>:8200/v1/chat/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "meta-llama/Llama-3.1-70B-Instruct",
    "messages": [{"role": "user", "content": "Summarize the state of KV cache disaggregation in 2026."}]
  }'
""",
        VLLM,
    ),
    Block("000", "blocks", 'tail -f mooncaked.log | grep "block_write\\|block_read"\n', HERE),
    # 002: a build-and-run post
    Block("002", "uv", "curl … | sh\n", why_not=OTHERS),
    Block(
        "002",
        "environment",
        "uv venv --python 3.10 --seed\nsource .venv/bin/activate\n",
        why_not="Python 3.10 is past its end of life; ours needs 3.11",
    ),
    Block("002", "install", "uv pip install mooncake-transfer-engine\n", WHEEL),
    Block(
        "002",
        "build vllm",
        "git clone …\ncd vllm\npython use_existing_torch.py\nuv pip install --no-build-isolation -e .\n",
        why_not=OTHERS,
    ),
    Block(
        "002",
        "mooncake.json",
        """{
"local_hostname": "10.1.222.133",
"metadata_server": "etcd://10.1.222.133:2379",
"global_segment_size": 274877906944,
"local_buffer_size": 274877906944,
"protocol": "tcp",
"device_name": "",
"master_server_address": "10.1.222.133:10001",
"cluster_id": "mooncake_cluster",
"root_fs_dir": "/mnt/mooncake_data"
}
""",
        HERE,
    ),
    Block(
        "002",
        "model",
        "git lfs install\ngit clone …\n",
        why_not=OTHERS,
    ),
    Block(
        "002",
        "processes",
        """lsof -t -i:8000
sudo lsof -i -P -n | grep mooncake_
sudo lsof -i -P -n | grep etcd
sudo lsof -i -P -n
sudo kill <PID1> <PID2> ...
""",
        why_not=BY_HAND,
    ),
    Block(
        "002",
        "etcd",
        "nohup etcd --listen-client-urls http://0.0.0.0:2379 "
        "--advertise-client-urls http://localhost:2379 > etcd_output.log 2>&1 &\n",
        why_not="our store needs no etcd; tests/transfer/metadata runs one",
    ),
    Block(
        "002",
        "master",
        """nohup mooncake_master \\
--port 10001 \\
--root_fs_dir /mnt/mooncake_data \\
--cluster_id mooncake_cluster \\
> logs/master.txt 2>&1 &
""",
        HERE,
    ),
    Block(
        "002",
        "prefill",
        _vllm_002(
            "kv_producer",
            8100,
            "prefill",
            "CUDA_VISIBLE_DEVICES",
            "export VLLM_WORKER_MULTIPROC_METHOD=spawn\nexport VLLM_USE_V1=0\n",
        ),
        VLLM,
    ),
    Block("002", "decode", _vllm_002("kv_consumer", 8200, "decode", "UDA_VISIBLE_DEVICES"), VLLM),
    Block(
        "002",
        "proxy",
        """python3 ../proxy_demo.py \\
--model /home/vllm/Qwen2.5-7B-Instruct-GPTQ-Int4 \\
--prefill localhost:8100 \\
--decode localhost:8200 \\
--port 8000 \\
2>&1 | tee logs/proxy-1-1.txt
""",
        HERE,
    ),
    Block(
        "002",
        "request",
        """curl http://127.0.0.1:8100/v1/completions \\
-H "Content-Type: application/json" \\
-d '{
"model": "/home/vllm/Qwen2.5-7B-Instruct-GPTQ-Int4",
"prompt": "what is Mooncake?",
"max_tokens": 30
}'
""",
        HERE,
    ),
    # 004: a guide to the store's connector
    Block("004", "install", "pip3 install mooncake-transfer-engine\n", WHEEL),
    Block("004", "vllm", "git clone …\ncd vllm\npip3 install -e .\n", why_not=OTHERS),
    Block(
        "004",
        "rdma",
        _file_004("rdma", "erdma_0"),
        HERE,
    ),
    Block("004", "tcp", _file_004("tcp", ""), HERE),
    Block(
        "004",
        "etcd",
        "etcd --listen-client-urls http://0.0.0.0:2379 --advertise-client-urls http://localhost:2379\n",
        why_not="our store needs no etcd; tests/transfer/metadata runs one",
    ),
    Block("004", "master", "mooncake_master --port 50001\n", HERE),
    Block("004", "prefill 8100", _vllm_004("", 8100, "kv_producer"), VLLM),
    *(
        Block(
            "004",
            f"prefill {port}",
            _vllm_004(f"CUDA_VISIBLE_DEVICES={port - 8100} ", port, "kv_producer"),
            why_not=SAME_COMMAND,
        )
        for port in (8101, 8102, 8103)
    ),
    Block("004", "decode 8200", _vllm_004("CUDA_VISIBLE_DEVICES=4 ", 8200, "kv_consumer"), VLLM),
    *(
        Block(
            "004",
            f"decode {port}",
            _vllm_004(f"CUDA_VISIBLE_DEVICES={port - 8196} ", port, "kv_consumer"),
            why_not=SAME_COMMAND,
        )
        for port in (8201, 8202, 8203)
    ),
    Block(
        "004",
        "proxy",
        """python3 examples/online_serving/disagg_examples/disagg_proxy_demo.py \\
    --model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 \\
    --prefill localhost:8100 localhost:8101 \\
    --decode localhost:8200 localhost:8201 \\
    --port 8000
""",
        HERE,
    ),
    Block(
        "004",
        "proxy with a key",
        """ADMIN_API_KEY="xxxxxxxx" python3 vllm/examples/online_serving/disagg_examples/disagg_demo.py \\
    --model Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4 \\
    --prefill localhost:8100 localhost:8101 \\
    --decode localhost:8200 localhost:8201 \\
    --port 8000 \\
    --scheduling round_robin
""",
        HERE,
    ),
    Block("004", "add prefill 8102", _add_004("prefill", 8102), HERE),
    Block("004", "add prefill 8103", _add_004("prefill", 8103), HERE),
    Block("004", "add decode 8202", _add_004("decode", 8202), HERE),
    Block("004", "add decode 8203", _add_004("decode", 8203), HERE),
    Block("004", "status", "curl localhost:8000/status | jq\n", HERE),
    Block(
        "004",
        "request",
        """curl -s http://localhost:8000/v1/completions \\
  -H "Content-Type: application/json" \\
  -d '{
    "model": "Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4",
    "prompt": "San Francisco is a",
    "max_tokens": 1000
  }'
""",
        HERE,
    ),
]


def block(seed: str, name: str) -> str:
    """Text of one block."""
    (found,) = (one.text for one in BLOCKS if (one.seed, one.name) == (seed, name))
    return found


def replaced(text: str, *changes: tuple[str, str]) -> str:
    """``text`` with what must differ on this machine; each ``old`` of ``changes`` must be in it."""
    for old, new in changes:
        assert old in text, f"{old!r} is not in the block:\n{text}"
        text = text.replace(old, new)
    return text


def main() -> None:
    for one in BLOCKS:
        first = one.text.strip().splitlines()[0]
        print(f"{one.seed} {one.name:20} {one.run_by or 'not run: ' + one.why_not:60} {first[:60]}")


if __name__ == "__main__":
    main()
