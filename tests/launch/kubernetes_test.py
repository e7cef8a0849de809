"""examples/kubernetes: manifests that their schemas take, and pods with the variables that Kubernetes gives them, each
as the processes of a host of its own."""

from __future__ import annotations

import copy
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from launched import ROOT, TINY, Environment, expect_same_training, free_port, run_together

EXAMPLES = ROOT / "examples" / "kubernetes"
SCHEMA = Path(__file__).parent / "pytorchjob.schema.json.xz"  # schemas.md says from where
# batch/v1 and v1 are not the operator's: of these, what stands above the template of pods.
JOB_SPEC = {
    "activeDeadlineSeconds", "backoffLimit", "backoffLimitPerIndex", "completionMode", "completions", "parallelism",
    "podFailurePolicy", "podReplacementPolicy", "suspend", "template", "ttlSecondsAfterFinished",
}  # fmt: skip
RANKS = 2  # of a pod here


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((EXAMPLES / name).read_text()))


def closed(schema: Any) -> Any:
    """The schema without room for fields that it does not name: the server would drop them without a word."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(part) for key, part in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        result["additionalProperties"] = False
    if schema.get("x-kubernetes-int-or-string"):
        result["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return result


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    schema = closed(json.loads(lzma.decompress(SCHEMA.read_bytes())))
    schema["properties"]["metadata"] = {"type": "object"}  # left to the server
    return schema


@pytest.fixture(scope="module")
def pod_schema(schema: dict[str, Any]) -> dict[str, Any]:
    replica = schema["properties"]["spec"]["properties"]["pytorchReplicaSpecs"]["additionalProperties"]
    template = replica["properties"]["template"]
    template["properties"]["metadata"] = {"type": "object"}
    return template


def pod_specs() -> Iterator[tuple[str, dict[str, Any]]]:
    [job] = manifests("pytorchjob.yaml")
    for kind, replica in job["spec"]["pytorchReplicaSpecs"].items():
        yield kind, replica["template"]["spec"]
    yield "Job", manifests("job.yaml")[1]["spec"]["template"]["spec"]


# ---- manifests ----
def test_the_operator_takes_the_job(schema: dict[str, Any], pod_schema: dict[str, Any]) -> None:
    [job] = manifests("pytorchjob.yaml")
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    jsonschema.validate(job, schema)


def test_pods_that_end_when_asked_are_no_failures_and_have_time_to_come_back() -> None:
    [rule] = [
        rule["onExitCodes"]["values"]
        for rule in manifests("job.yaml")[1]["spec"]["podFailurePolicy"]["rules"]
        if rule["action"] == "Ignore" and "onExitCodes" in rule
    ]
    for _, pod in pod_specs():
        settings = dict(word.split("=", 1) for word in pod["containers"][0]["args"] if "=" in word)
        assert [int(settings["preemption.exit_code"])] == rule
        assert int(settings["run.connect_deadline_seconds"]) >= 600


WRONG = {
    "type": lambda job: job["spec"]["pytorchReplicaSpecs"]["Worker"].update(replicas="one"),
    "misspelt": lambda job: job["spec"].update(nProcPerNode="8"),
    "in a pod": lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"].update(
        terminationGracePeriod=300
    ),
    "number for text": lambda job: job["spec"].update(nprocPerNode=8),
    "without containers": lambda job: job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"].pop(
        "containers"
    ),
}


@pytest.mark.parametrize("change", WRONG.values(), ids=WRONG)
def test_the_schema_finds_what_is_wrong(
    schema: dict[str, Any], pod_schema: dict[str, Any], change: Callable[[Any], None]
) -> None:
    job = copy.deepcopy(manifests("pytorchjob.yaml")[0])
    change(job)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(job, schema)


def test_the_indexed_job(pod_schema: dict[str, Any]) -> None:
    service, job = manifests("job.yaml")
    assert (job["apiVersion"], job["kind"], service["kind"]) == ("batch/v1", "Job", "Service")
    spec = job["spec"]
    assert set(spec) <= JOB_SPEC
    jsonschema.validate(spec["template"], pod_schema)
    # Pods are found as NAME-INDEX.SUBDOMAIN, by a headless service of that name which selects them.
    assert spec["completionMode"] == "Indexed" and spec["completions"] == spec["parallelism"]
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"]
    assert spec["template"]["spec"]["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    [container] = spec["template"]["spec"]["containers"]
    values = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert values["PET_NNODES"] == str(spec["completions"])
    assert values["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{service['metadata']['name']}"
    assert spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == container["name"]


@pytest.mark.parametrize("spec", [spec for _, spec in pod_specs()], ids=[name for name, _ in pod_specs()])
def test_pods_have_shared_memory_and_time_to_save(spec: dict[str, Any]) -> None:
    [container] = spec["containers"]
    [mount] = (mount for mount in container["volumeMounts"] if mount["mountPath"] == "/dev/shm")
    [volume] = (volume for volume in spec["volumes"] if volume["name"] == mount["name"])
    assert volume["emptyDir"]["medium"] == "Memory"
    assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in spec["volumes"]}
    assert spec["terminationGracePeriodSeconds"] > 30  # what Kubernetes gives by itself


# ---- pods ----
def command_of(container: dict[str, Any], work: Path) -> list[str]:
    words = [*container["command"], *container["args"]]
    return [str(TINY) if word == "/work/job.json" else word.replace("/work", str(work)) for word in words]


def pytorchjob_variables(job: dict[str, Any], pod: int) -> Environment:
    """Those of the operator (pkg/controller.v1/pytorch/envvar.go and master.go of v1.9.0). RANK counts pods."""
    spec = job["spec"]
    pods = sum(replica["replicas"] for replica in spec["pytorchReplicaSpecs"].values())
    address, port = f"{job['metadata']['name']}-master-0", "23456"
    return {
        "PYTHONUNBUFFERED": "1",
        "MASTER_PORT": port, "PET_MASTER_PORT": port, "MASTER_ADDR": address, "PET_MASTER_ADDR": address,
        "WORLD_SIZE": str(pods * int(spec["nprocPerNode"])), "RANK": str(pod), "PET_NODE_RANK": str(pod),
        "PET_NPROC_PER_NODE": spec["nprocPerNode"], "PET_NNODES": str(pods),
    }  # fmt: skip


def indexed_variables(container: dict[str, Any], pod: int) -> Environment:
    index = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    variables = {}
    for entry in container["env"]:
        if "valueFrom" in entry:
            assert entry["valueFrom"]["fieldRef"]["fieldPath"] == index
        variables[entry["name"]] = entry.get("value", str(pod))
    return variables | {"JOB_COMPLETION_INDEX": str(pod)}


def here(variables: Environment, port: str) -> Environment:
    """The same with what a machine without Kubernetes' network has."""
    moved = {"MASTER_ADDR": "127.0.0.2", "MASTER_PORT": port, "PET_NPROC_PER_NODE": str(RANKS)}
    moved |= {f"PET_{name}": moved[name] for name in ("MASTER_ADDR", "MASTER_PORT") if f"PET_{name}" in variables}
    return {name: value for name, value in (variables | moved).items() if not name.endswith("_SOCKET_IFNAME")}


def test_pods_of_a_pytorchjob(environment: Environment, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    [job] = manifests("pytorchjob.yaml")
    [container] = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"]
    words, port = command_of(container, tmp_path), free_port()
    pods = [(words, environment | here(pytorchjob_variables(job, pod), port)) for pod in range(2)]
    written = run_together(pods, tmp_path)
    assert "on 4 ranks" in written[0]
    expect_same_training(tmp_path / "runs" / "train", local_run(4), ranks=4)


@pytest.mark.long
def test_pods_of_an_indexed_job(environment: Environment, local_run: Callable[[int], Path], tmp_path: Path) -> None:
    [container] = manifests("job.yaml")[1]["spec"]["template"]["spec"]["containers"]
    words, port = command_of(container, tmp_path), free_port()
    pods = [(words, environment | here(indexed_variables(container, pod), port)) for pod in range(2)]
    run_together(pods, tmp_path)
    expect_same_training(tmp_path / "runs" / "train", local_run(4), ranks=4)


@pytest.mark.long
def test_torchrun_in_a_pod_reads_the_same(environment: Environment, tmp_path: Path) -> None:
    """A Python script: PET_* are options of torchrun, whose ranks then have numbers of their own."""
    script = tmp_path / "script.py"
    script.write_text(
        "import os, torch.distributed as dist, tesserae as tsm\n"
        "dist.init_process_group('gloo')\n"
        "tsm.init()\n"
        "print('rank', dist.get_rank(), 'of', dist.get_world_size(), os.environ['LOCAL_RANK'], flush=True)\n"
    )
    [job] = manifests("pytorchjob.yaml")
    port = free_port()
    pods = [(["torchrun", str(script)], environment | here(pytorchjob_variables(job, pod), port)) for pod in range(2)]
    written = run_together(pods, tmp_path)
    lines = sorted(line for log in written for line in log.splitlines() if line.startswith("rank "))
    assert lines == [f"rank {rank} of 4 {rank % RANKS}" for rank in range(4)]
