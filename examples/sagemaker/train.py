"""A language model of bytes, trained with PyTorch's fully_shard in a training job of SageMaker. estimator.py starts it;
anywhere else:

    SM_CHANNEL_TRAIN=docs SM_MODEL_DIR=/tmp/model torchrun --nproc-per-node 2 examples/sagemaker/train.py --steps 20

`tsm.init()` has no argument: it reads the modelparallel parameters that the estimator gave.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard

import tesserae as tsm


class Model(nn.Module):
    def __init__(self, width: int, layers: int, length: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, width)
        self.positions = nn.Embedding(length, width)
        layer = {"dim_feedforward": 4 * width, "dropout": 0.0, "batch_first": True, "norm_first": True}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, **layer) for _ in range(layers))
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.embedding(tokens) + self.positions(torch.arange(length, device=tokens.device))
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    # The toolkit passes hyperparameters as arguments, and the job's folders in the environment.
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--length", type=int, default=64, help="bytes of a sample")
    parser.add_argument("--batch", type=int, default=8, help="samples a rank and step")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", default=os.environ.get("SM_CHANNEL_TRAIN", "."))
    parser.add_argument("--model-dir", default=os.environ.get("SM_MODEL_DIR", "model"))
    # estimator.py's: for the library, which has read them from the environment.
    parser.add_argument("--mp_parameters", help=argparse.SUPPRESS)
    return parser.parse_args()


def read_text(folder: Path) -> Tensor:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    text = b"\n".join(file.read_bytes() for file in files)
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def main() -> None:
    options = parse()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", dist.get_node_local_rank()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    tsm.init()

    text = read_text(Path(options.data))
    torch.manual_seed(options.seed)
    model = Model(options.width, options.layers, options.length).to(device)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
    random = torch.Generator().manual_seed(options.seed + dist.get_rank())
    for step in range(1, options.steps + 1):
        begins = torch.randint(len(text) - options.length - 1, (options.batch,), generator=random)
        tokens = torch.stack([text[i : i + options.length + 1] for i in begins.tolist()]).to(device)
        loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        if dist.get_rank() == 0 and (step == 1 or step % 10 == 0 or step == options.steps):
            print(f"step {step:4}  loss {mean.item() / dist.get_world_size():.5f}", flush=True)

    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        folder = Path(options.model_dir)
        folder.mkdir(parents=True, exist_ok=True)
        torch.save(whole, folder / "model.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
