# SPDX-License-Identifier: Apache-2.0
"""The findings that an examination can have: what each one means, why it matters and what mends it.

It owns the codes, which are stable: programs may compare them. A check states where and what was seen;
severity, reason and remedy are those of the code, so that the same fault reads the same everywhere, and
``docs/reference/findings.md`` is generated from this table.
"""

from __future__ import annotations

import enum

import msgspec


class Severity(enum.StrEnum):
    """How much a finding matters."""

    BROKEN = "broken"
    "Requests fail, or nothing is reused on this link."

    WASTEFUL = "wasteful"
    "It works, but slower, or it will fail under load."

    NOTICE = "notice"
    "A fact to know: it is no fault, or it limits what can be examined."


class Link(enum.StrEnum):
    """The part of a deployment that a finding is about, from the client to the disk."""

    GATEWAY = "gateway"
    CONDUCTOR = "conductor"
    ENGINE = "engine"
    CONNECTOR = "connector"
    EVENTS = "events"
    STORE = "store"
    HOST = "host"


class Rule(msgspec.Struct, frozen=True):
    """What is the same for all findings of a code."""

    link: Link
    severity: Severity
    meaning: str
    why: str
    remedy: str


class DoctorFinding(msgspec.Struct, frozen=True):
    """One finding: ``where`` is an address or a path, ``seen`` the fact that led to it."""

    code: str
    severity: Severity
    link: Link
    where: str
    seen: str
    why: str
    remedy: str


def finding(code: str, where: str, seen: str) -> DoctorFinding:
    """The finding of ``code``."""
    rule = RULES[code]
    return DoctorFinding(code, rule.severity, rule.link, where, seen, rule.why, rule.remedy)


_BROKEN, _WASTEFUL, _NOTICE = Severity.BROKEN, Severity.WASTEFUL, Severity.NOTICE

RULES: dict[str, Rule] = {
    # gateway
    "gateway_unreachable": Rule(
        Link.GATEWAY,
        _BROKEN,
        "The gateway does not answer, or not as a server of the OpenAI API does.",
        "No client can be served.",
        "Start it, or name its address with `--url`; its log names the reason where it ended.",
    ),
    "client_key_refused": Rule(
        Link.GATEWAY,
        _BROKEN,
        "The gateway, or an engine, refuses the client's key.",
        "Clients with this key get 401 for every request.",
        "Pass a valid key with `--api-key` (`--engine-api-key` for engines); the gateway's keys are in the "
        "file of its `--api-keys-file`.",
    ),
    "status_hidden": Rule(
        Link.GATEWAY,
        _NOTICE,
        "The gateway shows its instances only to operators.",
        "Its instances and the conductor's view of them can't be examined.",
        "Pass the gateway's admin key with `--admin-api-key` or ADMIN_API_KEY, or name the engines with "
        "`--engine`.",
    ),
    "tls_mismatch": Rule(
        Link.GATEWAY,
        _BROKEN,
        "One side of a connection uses TLS and the other does not.",
        "Every connection between the two fails.",
        "Use https:// and the same `--tls-cert`, `--tls-key` and `--tls-ca` on both sides, or TLS on "
        "neither.",
    ),
    "no_http_server": Rule(
        Link.GATEWAY,
        _BROKEN,
        "What listens at the address of a gateway or an engine does not answer in HTTP.",
        "No request reaches the server that is meant.",
        "Name the port of its HTTP server with `--url` or `--engine`: ports of a store, a conductor or a "
        "gRPC service are others. A gateway with too many connections closes new ones, too.",
    ),
    "certificate_refused": Rule(
        Link.GATEWAY,
        _BROKEN,
        "A server's certificate is not accepted, or it does not accept ours.",
        "Connections to it fail.",
        "Use certificates of the same authority on both sides (`mooncake certs`), and pass `--tls-ca`.",
    ),
    "gateway_request_failed": Rule(
        Link.GATEWAY,
        _BROKEN,
        "The gateway answered a canary with an error.",
        "Clients get the same error.",
        "Read the error's message; `mooncake explain ID` shows how a request was routed.",
    ),
    "versions_differ": Rule(
        Link.GATEWAY,
        _WASTEFUL,
        "Processes of one kind have different versions.",
        "Formats of keys, events and answers may differ between versions, which shows as misses only.",
        "Finish the upgrade: start the same version everywhere.",
    ),
    "path_degraded": Rule(
        Link.GATEWAY,
        _WASTEFUL,
        "A request did not take the usual path through prefill and decode.",
        "One kind of instance does the work of both, and the disaggregation brings nothing.",
        "Start instances of the missing kind; `GET /status` of the gateway shows which are ready.",
    ),
    # conductor
    "no_instance": Rule(
        Link.CONDUCTOR,
        _BROKEN,
        "The gateway has no instance.",
        "Every request is refused with 503.",
        "Start the gateway with `--prefill` and `--decode`, or add instances with POST /instances/add.",
    ),
    "instance_not_ready": Rule(
        Link.CONDUCTOR,
        _BROKEN,
        "The conductor counts an instance as not ready.",
        "It gets no requests, and its cached blocks are not used.",
        "Check that it runs and that the gateway reaches its /health; GET /story/INSTANCE shows what "
        "happened.",
    ),
    "instances_not_started": Rule(
        Link.CONDUCTOR,
        _NOTICE,
        "Instances that the gateway lists have never answered, while others of the same role have.",
        "They get no requests. Names that are listed for later, as those of a rendered cluster up to "
        "`max_prefill` and `max_decode`, are no fault.",
        "Nothing, if they are not meant to run yet; else start them, or correct their addresses in the "
        "gateway's `--prefill` and `--decode`. With `--engine` one of them is examined all the same.",
    ),
    "conductor_unreachable": Rule(
        Link.CONDUCTOR,
        _BROKEN,
        "The gateway does not reach its conductor, or none of several.",
        "Requests are placed without knowledge of caches and load.",
        "Start the conductor, and check the gateway's `--conductor`.",
    ),
    "conductor_lost": Rule(
        Link.CONDUCTOR,
        _WASTEFUL,
        "The gateway does not reach one of its several conductors.",
        "Others place its requests; when they are lost as well, requests are placed without knowledge of "
        "caches and load.",
        "Start it again, or correct its address in the gateway's `--conductor`.",
    ),
    "scheduling_ignores_cache": Rule(
        Link.CONDUCTOR,
        _NOTICE,
        "The scheduling policy does not look at caches.",
        "Prompts reach instances that do not hold their prefix.",
        "Start the gateway with `--scheduling overlap` (the default).",
    ),
    "index_without_events": Rule(
        Link.CONDUCTOR,
        _WASTEFUL,
        "An engine publishes KV events, but the conductor does not follow them.",
        "The conductor infers the engine's blocks from the prompts that it sent there, and does not know "
        "what was evicted.",
        "Check that the conductor's host reaches the engine's event port, that every engine has a topic of "
        "its own, and that our workers' `--block-tokens` equals the gateway's; its log event "
        "`kv_events_ignored` has the reason.",
    ),
    "index_empty": Rule(
        Link.CONDUCTOR,
        _WASTEFUL,
        "The conductor knows no block of an engine that has just computed a prompt of several blocks.",
        "Requests are spread by load alone, so prefixes are computed again.",
        "Let engines publish KV events (see `events_off`), and check the conductor's log event "
        "`kv_events_ignored`.",
    ),
    # engine
    "engine_unreachable": Rule(
        Link.ENGINE,
        _BROKEN,
        "An engine does not answer, or not as a server of the OpenAI API does.",
        "Its requests fail or go elsewhere, and its cached blocks are lost.",
        "Start it, or correct its address in `--engine` or in the gateway's `--prefill` and `--decode`.",
    ),
    "engine_request_failed": Rule(
        Link.ENGINE,
        _BROKEN,
        "An engine answered a canary with an error.",
        "Requests that are sent there fail.",
        "Read the error's message and the engine's log.",
    ),
    "prefix_caching_off": Rule(
        Link.ENGINE,
        _BROKEN,
        "An engine's prefix cache is off.",
        "Every prompt is computed from its first token.",
        "vLLM: start it without `--no-enable-prefix-caching`; SGLang: without `--disable-radix-cache`.",
    ),
    "repeat_not_cached": Rule(
        Link.ENGINE,
        _BROKEN,
        "The same prompt, sent a second time to the same address, was computed again.",
        "No request reuses anything there.",
        "Look at the other findings of this address first; else check the engine's prefix cache, its free "
        "KV blocks, and for a router that it sends equal prefixes to the same engine.",
    ),
    "cached_tokens_hidden": Rule(
        Link.ENGINE,
        _NOTICE,
        "Answers do not report how many prompt tokens were cached.",
        "Clients and canaries can't see what is reused; the engine's counters are used instead, if it has "
        "any.",
        "vLLM: `--enable-prompt-tokens-details`; SGLang: `--enable-cache-report`.",
    ),
    "prompt_shorter_than_block": Rule(
        Link.ENGINE,
        _WASTEFUL,
        "Typical prompts are shorter than one KV block.",
        "Only whole blocks are reused, so a hit rate of 0 is what this configuration gives.",
        "Choose a smaller block (`--block-size` of vLLM, `--page-size` of SGLang, `--block-tokens` of our "
        "workers).",
    ),
    "salt_ignored": Rule(
        Link.ENGINE,
        _BROKEN,
        "A prompt was found in the cache although its `cache_salt` is another one.",
        "Clients can learn from answer times what others have sent.",
        "Use an engine version that supports `cache_salt`, and a gateway or router that passes it on.",
    ),
    "models_differ": Rule(
        Link.ENGINE,
        _BROKEN,
        "Engines behind one gateway serve different models.",
        "Requests fail or are answered by another model, and no KV is shared.",
        "Start all engines of a gateway with the same model and the same `--served-model-name`.",
    ),
    "answers_differ": Rule(
        Link.ENGINE,
        _BROKEN,
        "Two engines continue the same prompt differently, each with confidence.",
        "Their weights or number types differ: KV of one is wrong in the other.",
        "Load the same weights with the same `--dtype` and quantization in all of them.",
    ),
    "block_size_differs": Rule(
        Link.ENGINE,
        _BROKEN,
        "Engines that should share KV blocks have blocks of different sizes.",
        "No block of one is ever found by another, and the conductor may ignore their events.",
        "Start all of them with the same block size (`--block-size` of vLLM, `--block-tokens` of our "
        "workers and of the gateway).",
    ),
    "hash_algorithm_differs": Rule(
        Link.ENGINE,
        _BROKEN,
        "Engines that should share KV blocks name them by different hash algorithms.",
        "No block of one is ever found by another.",
        "Start all of them with the same `--prefix-caching-hash-algo`.",
    ),
    "hash_seed_differs": Rule(
        Link.ENGINE,
        _BROKEN,
        "Engines that should share KV blocks give the same tokens different block hashes.",
        "No block of one is ever found by another.",
        "Start all of them with the same PYTHONHASHSEED, or with none and `--prefix-caching-hash-algo "
        "sha256`.",
    ),
    "cache_dtype_differs": Rule(
        Link.ENGINE,
        _BROKEN,
        "Engines that should share KV blocks keep them in different number types.",
        "No block of one can be used by another.",
        "Start all of them with the same `--kv-cache-dtype` and `--dtype`.",
    ),
    "requests_wait": Rule(
        Link.ENGINE,
        _NOTICE,
        "An engine's KV memory is full and requests wait for it.",
        "Blocks are evicted before they can be reused.",
        "Give the engine more KV memory, or add instances.",
    ),
    # connector
    "connector_missing": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "An engine that should share KV has no connector.",
        "It reads nothing from the store and from other engines, and saves nothing.",
        "Start vLLM with `--kv-transfer-config` naming our connector (docs/integrations/vllm.md), our "
        "workers with `--master`.",
    ),
    "connector_role": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "An engine's connector has a role that does not fit what the gateway uses it for.",
        "A prefill engine that only reads, or a decode engine that only writes, hands nothing over.",
        "Use `kv_role` kv_producer or kv_both for prefill, kv_consumer or kv_both for decode.",
    ),
    "kv_identity_differs": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "Engines that share a store name their blocks by different identities.",
        "Weights, number type or KV layout differ, so that no block of one is found by another.",
        "Load the same model folder with the same dtype, block size and parallelism; the log event "
        "`weights_hashed` shows each one's digest.",
    ),
    "pool_not_shared": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "A prompt that one engine computed was computed again by another, though both use a store.",
        "The store costs memory and network, and saves nothing.",
        "Compare the engines' weights digest, dtype, block size, hash algorithm and seed, and their "
        "connectors' addresses of the master.",
    ),
    "pool_not_written": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "An engine computed a prompt of several blocks, and no object reached the store.",
        "Other engines, and this one after an eviction or a restart, compute it again.",
        "Check the connector's address of the master (`mooncake_store_addr`, or `master_server_address` in "
        "the file of MOONCAKE_CONFIG_PATH; `--master` of our workers), its `kv_role`, and the store's free "
        "memory.",
    ),
    "decode_without_kv": Rule(
        Link.CONNECTOR,
        _BROKEN,
        "Decode computed the whole prompt that prefill had computed just before.",
        "The disaggregation costs one prefill more than a plain server.",
        "Give both sides a connector that matches the gateway's `--protocol`, and check that decode reaches"
        " prefill's connector port and the store.",
    ),
    # events
    "events_off": Rule(
        Link.EVENTS,
        _WASTEFUL,
        "An engine publishes no KV events.",
        "A router can only guess what it holds.",
        'vLLM: `--kv-events-config \'{"enable_kv_cache_events": true, "publisher": "zmq", ...}\'`; SGLang: '
        "`--kv-events-config`.",
    ),
    "events_absent": Rule(
        Link.EVENTS,
        _NOTICE,
        "An engine publishes no KV events, and no gateway was named that would read them.",
        "A router in front of it can only guess what it holds.",
        "Nothing, without such a router; else see `events_off`.",
    ),
    "events_unknown": Rule(
        Link.EVENTS,
        _NOTICE,
        "An engine does not say where it publishes KV events.",
        "They can't be examined.",
        "Name the endpoint with `--events HOST:PORT=tcp://HOST:5557[=tcp://HOST:5558]`.",
    ),
    "events_not_flowing": Rule(
        Link.EVENTS,
        _BROKEN,
        "An engine names an event endpoint, computed a prompt, and no event arrived.",
        "A router's index of this engine stays empty or stale.",
        "Let it listen on an address that the router reaches (`tcp://*:5557`, not loopback), and open the "
        "port.",
    ),
    "events_wrong_topic": Rule(
        Link.EVENTS,
        _BROKEN,
        "Events have another topic than the one to which the router subscribes.",
        "ZeroMQ drops them before the router sees them.",
        "Set the same topic on both sides: `topic` of `--kv-events-config`, and that of the router.",
    ),
    "events_not_replayable": Rule(
        Link.EVENTS,
        _WASTEFUL,
        "An engine does not replay earlier events.",
        "A router that starts later, or loses a message, never learns of these blocks.",
        "Set `replay_endpoint` in `--kv-events-config`, and open its port.",
    ),
    "events_unreadable": Rule(
        Link.EVENTS,
        _BROKEN,
        "Events arrive in a form that is not known.",
        "They are dropped.",
        "Use an engine version whose events are supported (docs/conductor.md), or report the version.",
    ),
    # store
    "master_unreachable": Rule(
        Link.STORE,
        _BROKEN,
        "The store's master does not answer.",
        "Nothing is read from the store or saved in it.",
        "Start it, or correct the address; with several masters name all of them, or their lease store.",
    ),
    "master_denied": Rule(
        Link.STORE,
        _BROKEN,
        "The store's master refuses the credential.",
        "Processes with this credential can't use the store.",
        "Use the cluster's key file (`--cluster-key-file`) or certificate on both sides.",
    ),
    "store_without_memory": Rule(
        Link.STORE,
        _BROKEN,
        "The store has no memory that takes objects.",
        "Every save is refused, and nothing is reused across engines.",
        "Start nodes with `mooncake node --master ...`, and check their log for `mount_denied`.",
    ),
    "segment_not_ready": Rule(
        Link.STORE,
        _WASTEFUL,
        "A part of the store's memory takes no objects.",
        "The store is smaller than it was made, and objects there may be lost.",
        "Check the node that owns it; `mooncake store top` shows its state.",
    ),
    "store_not_writable": Rule(
        Link.STORE,
        _BROKEN,
        "All of the store's memory is being drained or is not ready.",
        "New prefixes are not saved.",
        "Check the nodes named by `segment_not_ready`; `mooncake store undrain JOB` ends a drain.",
    ),
    "store_full": Rule(
        Link.STORE,
        _BROKEN,
        "The store refuses a new object.",
        "New prefixes are not saved.",
        "Add memory or an SSD tier, remove pins that are no longer needed, or raise the tenant's quota.",
    ),
    "store_log_unwritable": Rule(
        Link.STORE,
        _BROKEN,
        "The master's log can't be written.",
        "Puts, removals and pins are refused; reads go on.",
        "Make room on the disk under the oplog: waiting records are written within a second. If the disk is "
        "broken, stop the leader while a standby is in sync, which takes over; see docs/operations.md, "
        "MooncakeOplogUnwritable.",
    ),
    "durable_put_fails": Rule(
        Link.STORE,
        _BROKEN,
        "A node can't copy objects to its SSD.",
        "Durable puts are refused, and what is evicted from the node's memory is lost.",
        "Make room on the disk of the folder that is named. If the folder was removed, or its disk is not "
        "mounted, mend that and restart the node. `task_failed` in the node's log has the reason of each.",
    ),
    "durable_put_slow": Rule(
        Link.STORE,
        _WASTEFUL,
        "A small durable object was not on SSD in time.",
        "Durable puts take long, or are refused when their time is over.",
        "Compare the disk's speed (`--disk`) with what is written to it; `task_failed` in the node's log has "
        "the reason if copies fail.",
    ),
    "store_object_lost": Rule(
        Link.STORE,
        _BROKEN,
        "An object that was just stored could not be read back.",
        "Blocks that engines save can't be loaded.",
        "Check that this host reaches the nodes' transfer ports, not only the master; see `--transfer-` "
        "settings.",
    ),
    "reports_of_wrong_bytes": Rule(
        Link.STORE,
        _WASTEFUL,
        "Readers reported wrong bytes in the store.",
        "The memory, card or kernel of a machine is bad.",
        "See docs/operations.md, Failures; replace the machine whose reports are refuted or whose replicas "
        "are bad.",
    ),
    "earlier_canary_lost": Rule(
        Link.STORE,
        _NOTICE,
        "A prompt of an earlier examination is no longer cached.",
        "It was evicted, or did not survive a restart.",
        "Give the store more memory or an SSD tier, if prompts should be reusable after this time.",
    ),
    # host
    "clock_skew": Rule(
        Link.HOST,
        _WASTEFUL,
        "A host's clock differs from this one's.",
        "Signed requests are refused, ages of events and traces are wrong.",
        "Run a time service (chrony, systemd-timesyncd) on every host.",
    ),
    "few_file_descriptors": Rule(
        Link.HOST,
        _WASTEFUL,
        "A process may open few files.",
        "Connections of clients, engines and nodes are refused under load.",
        "Raise the limit to 65536: `ulimit -n 65536` before its start, LimitNOFILE= in systemd, or the "
        "container's ulimits.",
    ),
    "little_shared_memory": Rule(
        Link.HOST,
        _WASTEFUL,
        "/dev/shm is small.",
        "Engines with several processes fail or are slow, and transfers on this host can't use it.",
        "Docker: `--shm-size 16g` or `--ipc host`; Kubernetes: an emptyDir of medium Memory at /dev/shm.",
    ),
    "little_locked_memory": Rule(
        Link.HOST,
        _NOTICE,
        "This host has RDMA devices, and processes may lock little memory.",
        "Memory can't be registered for RDMA, so transfers fail or use TCP.",
        "`ulimit -l unlimited`, LimitMEMLOCK=infinity in systemd, or the container's ulimits.",
    ),
    "no_huge_pages": Rule(
        Link.HOST,
        _NOTICE,
        "This host has no huge pages for a store's memory.",
        "Registering and reading large memory is slower.",
        "`sysctl vm.nr_hugepages=N` before the node starts; a store of a few GiB needs none.",
    ),
    "disk_slow": Rule(
        Link.HOST,
        _WASTEFUL,
        "The disk writes slower than was promised.",
        "The SSD tier falls behind, and objects are evicted before they are copied.",
        "Check the device (its cache, its health, other writers), or correct `--disk-write-mb-s`.",
    ),
    # the examination itself
    "not_examined": Rule(
        Link.HOST,
        _NOTICE,
        "A part was not examined.",
        "A fault there would not be found by this run.",
        "Raise `--budget-s`, or examine fewer engines at a time.",
    ),
}
