import json

import pytest

from mmd_api import pipeline
from mmd_api.history import is_read_by_pods, spec_digest
from mmd_api.pipeline import PipelineConfig, inputs_of, pipeline_revision
from mmd_api.readers import selected_spec
from mmd_api.resource import MultimodalDeployment
from mmd_api.status import MultimodalDeploymentStatus, PinnedRevision
from support.cluster.manifests import base_manifest, merge


def revision(**spec) -> str:
    return pipeline_revision(MultimodalDeployment.parse(merge(base_manifest(), {"spec": spec})).spec)


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"id": "org/model"}},
        {"model": {"id": "org/model", "revision": "v2"}},
        {"model": {"dtype": "BFloat16"}},
        {"model": {"id": "org/model", "storage": {"type": "Hub"}}},
        {"model": {"id": "/models", "storage": {"type": "PersistentVolumeClaim", "claimName": "a"}}},
        {"model": {"id": "/models", "storage": {"type": "PersistentVolumeClaim", "claimName": "b"}}},
        {
            "model": {
                "id": "/models",
                "storage": {"type": "PersistentVolumeClaim", "claimName": "b", "subPath": "c"},
            }
        },
        {"gateway": {"media": {"video": {"maxFrames": 8}}}},
        {"gateway": {"media": {"video": {"framesPerSecondMilli": 1000}}}},
        {"decode": {"kvBlockTokens": 32}},
        {"transfer": {"kv": {"backend": "Nixl"}}},
        {"transfer": {"kv": {"wireFormat": "Int8"}}},
        {"engine": {"kvDtype": "Int8"}},
        {"engine": {"kvDtype": "Fp8"}},
        {"image": {"worker": "multimodal-worker:next"}},
    ],
    ids=json.dumps,
)
def test_what_changes_embeddings_or_blocks_changes_the_revision(change):
    assert revision(**change) != revision()


def test_each_of_those_changes_yields_a_separate_revision():
    claims = [{"id": "/models", "storage": {"type": "PersistentVolumeClaim", "claimName": c}} for c in "ab"]
    assert (
        len({revision(model=m) for m in [*claims, {"id": "/models"}, {"id": "/models", "dtype": "Float16"}]})
        == 4
    )


@pytest.mark.parametrize(
    "change",
    [
        {"model": {"maxModelLen": 4096}},
        {"image": {"nats": "nats:next", "pullPolicy": "Always"}},
        {
            "gateway": {
                "replicas": 3,
                "media": {"image": {"maxPixels": 1_000_000}, "video": {"maxBytes": 2048}},
            }
        },
        {"gateway": {"maxRetries": 1, "requestTimeoutSeconds": 5}},
        {"encoder": {"replicas": 3, "cacheMebibytes": 1, "batching": {"maxItems": 1}}},
        {"encoder": None},
        {"prefill": {"chunkTokens": 64, "prefixCache": False}},
        {"decode": {"replicas": 9, "maxSequences": 1, "kvCacheMebibytes": 16}},
        {"decode": {"template": {"labels": {"a": "b"}}, "nodeSelector": {"a": "b"}}},
        {"transfer": {"embedding": {"chunkKibibytes": 64}, "kv": {"leaseSeconds": 5}}},
        {"nats": {"managed": False, "url": "nats://elsewhere:4222"}},
        {"slo": {"ttftMilliseconds": 100}, "gpuBudget": 1, "paused": True},
        {"observability": {"logLevel": "Debug"}},
    ],
    ids=json.dumps,
)
def test_sizes_limits_placement_and_promises_leave_the_revision_alone(change):
    assert revision(**change) == revision()


QUANTIZED = {"quantization": "fp8"}
NCCL = {"kv": {"backend": "Nccl"}}
NATIVE, VLLM = "8e64c2ced6", "c3dd1d2cc6"  # before vLLM had settings


@pytest.mark.parametrize(
    "settings",
    [QUANTIZED, {"kvCacheDtype": "Fp8E4M3"}, {"kvCacheDtype": "Fp8E5M2"}, {"extraArgs": ["--seed=1"]}],
    ids=json.dumps,
)
def test_what_vllm_makes_of_weights_and_kv_changes_the_revision(settings):
    plain = revision(engine={"type": "VLLM"}, prefill=None)
    assert plain != revision(prefill=None)
    assert revision(engine={"type": "VLLM", "decode": settings}, prefill=None) != plain


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tensorParallelSize": 2},
        {"maxNumBatchedTokens": 1024, "enforceEager": False},
        {"speculative": {"method": "ngram", "numSpeculativeTokens": 4}},
    ],
    ids=json.dumps,
)
def test_how_vllm_computes_the_same_leaves_the_revision_alone(settings):
    engine = {"type": "VLLM", "decode": settings}
    assert revision(engine=engine, prefill=None) == revision(engine={"type": "VLLM"}, prefill=None)


def test_engine_arguments_per_pool_and_their_order_change_the_revision():
    def of(**pools: list[str]) -> str:
        settings = {name: {"extraArgs": arguments} for name, arguments in pools.items()}
        return revision(
            decode={"gpus": 1}, prefill={"gpus": 1}, transfer=NCCL, engine={"type": "VLLM", **settings}
        )

    one, two = ["--seed=1"], ["--enable-eplb"]
    different = [{}, {"decode": one}, {"prefill": one}, {"decode": one, "prefill": one}]
    different += [{"decode": one, "prefill": two}, {"decode": two, "prefill": one}, {"decode": [*one, *two]}]
    assert len({of(**pools) for pools in different}) == len(different)


SQL, POEMS = {"name": "sql", "id": "org/sql"}, {"name": "poems", "id": "org/poems"}


def test_adapters_change_the_revision_and_their_order_does_not():
    def of(*adapters) -> str:
        return revision(engine={"type": "VLLM", "adapters": list(adapters)})

    sets = [(), (SQL,), (SQL, POEMS), ({**SQL, "revision": "v2"},), ({**SQL, "id": "org/other"},)]
    renamed = ({**SQL, "name": "poems"}, {**POEMS, "name": "sql"})
    assert len({of(*adapters) for adapters in (*sets, renamed)}) == len(sets) + 1
    assert of(SQL, POEMS) == of(POEMS, SQL)


def test_adding_a_prefill_pool_with_default_kv_transfer_keeps_the_revision():
    spec = {"decode": {"gpus": 1}, "transfer": NCCL}
    assert revision(**spec, prefill={"gpus": 1}) == revision(**spec, prefill=None)


def test_a_prefill_pool_with_the_quantization_of_decode_joins_its_revision():
    spec, both = {"decode": {"gpus": 1}, "transfer": NCCL}, {"decode": QUANTIZED, "prefill": QUANTIZED}
    alone = revision(**spec, engine={"type": "VLLM", "decode": QUANTIZED}, prefill=None)
    assert revision(**spec, engine={"type": "VLLM", **both}, prefill={"gpus": 1}) == alone


def test_revisions_without_engine_settings_equal_those_of_earlier_releases():
    spec = {"model": {"id": "org/model"}, "image": {"worker": "worker:1"}, "prefill": None, "transfer": NCCL}
    assert (revision(**spec), revision(**spec, engine={"type": "VLLM"})) == (NATIVE, VLLM)


def test_each_kv_backend_has_a_revision_and_the_default_changes_none():
    gpus = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}
    spec = {"model": {"id": "org/model"}, "image": {"worker": "worker:1"}, **gpus}
    revisions = [revision(**spec, transfer={"kv": {"backend": name}}) for name in ("Nccl", "Gloo", "Nixl")]
    assert len(set(revisions)) == 3
    assert revisions[0] == revision(**spec, transfer=None) == NATIVE


@pytest.mark.parametrize(
    ("prefill_gpus", "decode_gpus", "backend"), [(1, 1, "Nccl"), (1, 0, "Gloo"), (0, 0, "Gloo")]
)
def test_auto_is_the_backend_that_fits_the_gpus(prefill_gpus, decode_gpus, backend):
    spec = {"prefill": {"gpus": prefill_gpus}, "decode": {"gpus": decode_gpus}}
    named = MultimodalDeployment.parse(
        merge(base_manifest(), {"spec": {**spec, "transfer": {"kv": {"backend": backend}}}})
    ).spec
    left_out = MultimodalDeployment.parse(merge(base_manifest(), {"spec": {**spec, "transfer": None}})).spec
    assert left_out.kv_backend == backend
    assert pipeline_revision(left_out) == pipeline_revision(named)
    assert spec_digest(left_out) == spec_digest(named)
    for pool in ("prefill", "decode"):  # which read no other pool's gpus
        assert inputs_of(left_out, pool) == inputs_of(named, pool)
        config = PipelineConfig.of(left_out, "somewhere", "sample", pool)
        assert config.spec.transfer.kv.backend == config.spec.kv_backend == backend


def test_files_and_hashes_leave_the_first_kv_backend_out_as_they_always_did():
    pools = {"prefill": {"gpus": 1}, "decode": {"gpus": 1}}
    for more in (pools, {"prefill": None, "decode": {"gpus": 1}}):
        stored = MultimodalDeployment.parse(merge(base_manifest(), {"spec": {**more, "transfer": NCCL}})).spec
        assert "transfer" not in selected_spec(stored, is_read_by_pods)
    named = MultimodalDeployment.parse(merge(base_manifest(), {"spec": {**pools, "transfer": NCCL}})).spec
    file = json.loads(PipelineConfig.text_for(named, "somewhere", "sample", "decode"))
    assert "transfer" not in file["spec"]
    assert PipelineConfig.parse(json.dumps(file)).spec.kv_backend == "Nccl"


@pytest.mark.parametrize("engine", ["Native", "VLLM"])
def test_without_a_prefill_pool_backend_and_wire_format_change_no_revision(engine):
    spec = {"prefill": None, "decode": {"gpus": 1}, "engine": {"type": engine}}
    formats = ("Model", "Fp8") if engine == "Native" else ("Model",)
    assert len({revision(**spec, transfer={"kv": {"wireFormat": f}}) for f in formats}) == 1
    assert (
        len({revision(**spec, transfer={"kv": {"backend": b}}) for b in ("Auto", "Nccl", "Gloo", "Nixl")})
        == 1
    )


def test_naming_the_wire_format_of_8_bit_kv_keeps_the_revision():
    packed = {"engine": {"kvDtype": "Int8"}}
    named = {name: revision(**packed, transfer={"kv": {"wireFormat": name}}) for name in ("Model", "Int8")}
    assert len({*named.values()}) == 1
    apart = [revision(engine={"kvDtype": name}) for name in ("Model", "Int8", "Fp8")]
    assert len({*apart}) == 3
    assert revision(**packed, prefill=None) != revision(prefill=None)


def test_the_wire_version_changes_the_revision(monkeypatch):
    before = revision()
    monkeypatch.setattr(pipeline, "WIRE_VERSION", pipeline.WIRE_VERSION + 1)
    assert revision() != before


def test_a_revision_is_ten_hex_digits():
    assert len(revision()) == 10
    assert int(revision(), 16) >= 0


def test_a_worker_configuration_survives_a_round_trip(tmp_path):
    spec = MultimodalDeployment.parse(base_manifest()).spec
    (tmp_path / "decode.json").write_text(PipelineConfig.text_for(spec, "default", "sample", "decode"))
    config = PipelineConfig.load(tmp_path / "decode.json")
    assert config == PipelineConfig.of(spec, "default", "sample", "decode")
    assert config.spec.decode.max_sequences == spec.decode.max_sequences


def test_the_previous_release_reads_a_pin_without_adapters():
    """They refuse fields that they do not know, and are not replaced when the operator is upgraded."""
    pin = PinnedRevision(revision="0123456789", identity="abcdefabcd", commit="a" * 40, image="r/w@sha256:1")
    text = PipelineConfig.text_for(
        MultimodalDeployment.parse(base_manifest()).spec, "default", "sample", "decode", pin
    )
    assert set(json.loads(text)["pinned"]) == {"revision", "identity", "commit", "image"}
    assert "adapters" not in MultimodalDeploymentStatus(pinned=[pin]).model_dump(by_alias=True)["pinned"][0]
