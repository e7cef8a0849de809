"""Drug discovery: a small transformer reads molecules as SMILES and predicts a property of each, sharded by FSDP.

    python examples/python/molecules.py                                                # 1 process
    torchrun --nproc-per-node 4 examples/python/molecules.py                           # 4 processes
    torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        examples/python/molecules.py                                                   # 2 hosts: this on both of them

The molecules are made here, of fragments that chemists know, and their property follows from a formula of atoms, bonds
and rings, so that what can be learnt is known: R2 on molecules that training never sees goes from 0 (the mean of all)
to 1. Nothing else is needed: no RDKit, no download. Without the two lines that are marked, it trains with PyTorch's own
FullyShardedDataParallel, to the same losses.
"""

from __future__ import annotations

import random
import re
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import recipe
import tesserae as tsm  # line 1

HELD_OUT = 400  # molecules
LENGTH = 100  # tokens of the longest molecule that the model reads
TOKENS = ("Cl", "Br", *"CNOSFcn()-=#12")  # 0 is padding, so the first one is 1
TOKEN = re.compile("|".join(re.escape(token) for token in TOKENS))
LINKS = ("C", "C", "O", "N", "S", "C(=O)", "C(=O)N", "C(=O)O", "C=C", "C#C", "-c1ccc(cc1)", "C1CCC(CC1)", "C1CCN(CC1)")
BRANCHED = ("C({})", "C(C)({})", "N({})", "-c2cc({})cc(c2)")
ENDS = ("C", "O", "N", "F", "Cl", "Br", "C#N", "C(F)(F)F", "C(=O)O", "C1CC1", "C1CCOCC1", "-c1ccccc1", "-c1ccncc1")
ORDERS = {"-": 1.0, "=": 2.0, "#": 3.0}


class Molecule(NamedTuple):
    atoms: list[str]
    bonds: list[tuple[int, int, float]]  # two atoms and the order; 1.5: aromatic

    def rings(self) -> int:
        return len(self.bonds) - len(self.atoms) + 1


def make_molecule(draw: random.Random) -> str:
    """One to three links, some with a branch, between two ends."""
    chain = [draw.choice(("C", "N", "O", "CC", "c1ccc(cc1)"))]
    for _ in range(draw.randint(1, 3)):
        chain.append(draw.choice(LINKS) if draw.random() < 0.7 else draw.choice(BRANCHED).format(draw.choice(ENDS)))
    return "".join([*chain, draw.choice(ENDS)])


def read_molecule(smiles: str) -> Molecule:
    """The graph of a SMILES of the tokens above. Raises ValueError where it is none."""
    molecule, before, order = Molecule([], []), -1, 0.0
    branches: list[int] = []
    rings: dict[str, int] = {}  # that are open: the atom to close with

    def bind(one: int, other: int) -> None:
        aromatic = molecule.atoms[one].islower() and molecule.atoms[other].islower()
        molecule.bonds.append((one, other, order or (1.5 if aromatic else 1.0)))

    if "".join(TOKEN.findall(smiles)) != smiles:
        raise ValueError(f"{smiles}: a token that is none of {' '.join(TOKENS)}")
    for token in TOKEN.findall(smiles):
        if token == "(":
            branches.append(before)
        elif token == ")":
            before = branches.pop()
        elif token in ORDERS:
            order = ORDERS[token]
        elif token.isdigit() and token not in rings:
            rings[token] = before
        elif token.isdigit():
            bind(rings.pop(token), before)
        else:
            molecule.atoms.append(token)
            if before >= 0:
                bind(before, len(molecule.atoms) - 1)
            before, order = len(molecule.atoms) - 1, 0.0
    if branches or rings:
        raise ValueError(f"{smiles}: a branch or a ring that does not end")
    return molecule


ATOM = {"C": 0.4, "N": -0.7, "O": -0.5, "S": 0.3, "F": 0.4, "Cl": 0.8, "Br": 1.0}
PULL = {"C": 2.55, "N": 3.04, "O": 3.44, "S": 2.58, "F": 3.98, "Cl": 3.16, "Br": 2.96}  # Pauling's electronegativities


def property_of(molecule: Molecule) -> float:
    """Like a logP: atoms that water likes and dislikes, less the polarity of bonds, more for rings."""
    names = [atom.capitalize() for atom in molecule.atoms]
    polarity = sum(order * abs(PULL[names[one]] - PULL[names[other]]) for one, other, order in molecule.bonds)
    return sum(ATOM[name] for name in names) - 0.5 * polarity + 0.5 * molecule.rings()


def make_set(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens of so many different molecules, padded with 0, and the property of each."""
    draw = random.Random(seed)
    molecules: dict[str, float] = {}
    while len(molecules) < count:
        smiles = make_molecule(draw)
        molecules[smiles] = property_of(read_molecule(smiles))
    rows = [torch.tensor([1 + TOKENS.index(token) for token in TOKEN.findall(smiles)]) for smiles in molecules]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True), torch.tensor(list(molecules.values()))


class Reader(nn.Module):
    """Each token says what it adds to the property, by itself and by what stands around it."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(1 + len(TOKENS), width)
        self.places = nn.Embedding(LENGTH, width)
        # Smooth, so that what differs by rounding stays close: with ReLU, losses of 1 and 4 ranks were 7e-5 apart.
        kind: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "activation": torch.tanh}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(width, 4, 2 * width, **kind) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1)
        nn.init.zeros_(self.head.weight)  # long molecules begin where short ones do

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=tokens == 0)
        return self.head(self.norm(x)).squeeze(2).masked_fill(tokens == 0, 0.0).sum(1)


def r2(answers: Tensor, truth: Tensor) -> float:
    return (1 - (answers - truth).square().sum() / (truth - truth.mean()).square().sum()).item()


def main() -> None:
    parser = recipe.parser(__doc__, steps=60, batch=64, lr=5e-3)
    parser.add_argument("--molecules", type=int, default=4000, help="to train on (4000)")
    parser.add_argument("--width", type=int, default=32, help="of the transformer (32)")
    parser.add_argument("--layers", type=int, default=2, help="of the transformer (2)")
    options = parser.parse_args()

    device = recipe.start(options)
    tsm.init(recipe.settings(options))  # line 2
    tokens, truth = make_set(options.molecules + HELD_OUT, options.seed)
    training, held_out = slice(options.molecules), slice(options.molecules, None)
    mean, deviation = truth[training].mean(), truth[training].std()
    target = (truth - mean) / deviation

    model = FSDP(
        Reader(options.width, options.layers),
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)

    def evaluate() -> dict[str, float]:
        return {"r2": r2(recipe.predict(model, (tokens[held_out],), options.batch), target[held_out])}

    run = recipe.Run(model, optimizer, evaluate, options)
    for step, index in run.steps(options.molecules):
        loss = nn.functional.mse_loss(model(tokens[index].to(device)), target[index].to(device))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.end(step, loss)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
