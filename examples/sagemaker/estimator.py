"""Starts trainings on Amazon SageMaker with its Python SDK, version 2 (pip install 'sagemaker<3'):

    python examples/sagemaker/estimator.py script --role arn:... --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/tesserae
    python examples/sagemaker/estimator.py program --role arn:... --image ... --job job.json --data s3://bucket/text

`script` runs train.py, which says `tsm.init()`: its configuration is what stands here as modelparallel parameters.
`program` runs `tesserae train`: hyperparameters are keys of its configuration. The image is that of Dockerfile beside
this file. --local tries it on this machine, in Docker (instance type local).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from sagemaker.estimator import Estimator
from sagemaker.pytorch import PyTorch

HERE = Path(__file__).resolve().parent
# The keys of the model parallelism library v2 (docs/configuration.md), and what is Tesserae's own.
PARALLEL = {"hybrid_shard_degree": 8, "random_seed": 12345}


def machines(options: argparse.Namespace) -> dict[str, Any]:
    """What both kinds of job ask of SageMaker."""
    return {
        "role": options.role,
        "image_uri": options.image,
        "instance_type": "local" if options.local else options.instance_type,
        "instance_count": options.instances,
        "sagemaker_session": options.session,
        # What lies in /opt/ml/checkpoints goes there while the job runs, and comes back when it starts again.
        **({} if options.local else {"checkpoint_s3_uri": options.checkpoints}),
        **({"use_spot_instances": True, "max_run": 86400, "max_wait": 172800} if options.spot else {}),
    }


def script_estimator(options: argparse.Namespace) -> PyTorch:
    """torchrun on every host: the toolkit in the image starts it for `torch_distributed`."""
    return PyTorch(
        entry_point="train.py",
        source_dir=str(HERE),
        hyperparameters={"steps": options.steps},
        distribution={
            "torch_distributed": {"enabled": True},
            "smdistributed": {"modelparallel": {"enabled": True, "parameters": PARALLEL}},
        },
        **machines(options),
    )


def program_estimator(options: argparse.Namespace) -> Estimator:
    """`tesserae train` on every host: it reads what SageMaker mounts, and starts a rank for each GPU."""
    return Estimator(
        container_entry_point=["tesserae", "train", f"/opt/ml/input/data/job/{Path(options.job).name}"],
        container_arguments=["--resume", "auto"],
        hyperparameters={"train.steps": options.steps, "data.path": "channel:train", **PARALLEL},
        **machines(options),
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["script", "program"])
    parser.add_argument("--role", required=True, help="the role that SageMaker takes on")
    parser.add_argument("--image", required=True)
    parser.add_argument("--data", default="s3://my-bucket/text", help="the channel `train`")
    parser.add_argument("--job", default="job.json", help="program: the configuration, a file here or on S3")
    parser.add_argument("--checkpoints", default="s3://my-bucket/checkpoints")
    parser.add_argument("--instance-type", default="ml.p4d.24xlarge")
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--spot", action="store_true", help="spot instances, which may be taken away")
    parser.add_argument("--local", action="store_true")
    parser.set_defaults(session=None)
    return parser.parse_args()


def main() -> None:
    options = parse()
    if options.kind == "script":
        script_estimator(options).fit({"train": options.data})
        return
    estimator = program_estimator(options)
    job = options.job
    if not job.startswith("s3://") and not options.local:
        job = estimator.sagemaker_session.upload_data(job, key_prefix="tesserae/job")
    estimator.fit({"train": options.data, "job": job if "://" in job else f"file://{Path(job).resolve()}"})


if __name__ == "__main__":
    main()
