"""python -m tesserae.run: scripts written for SMP v2."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path


def run(
    tmp_path: Path, script: str, *arguments: str, options: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, "-m", "tesserae.run", *options, str(file), *arguments],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip


def test_torch_sagemaker_is_tesserae(tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("value = 5")
    done = run(tmp_path, """\
        import os, sys
        import beside
        import torch.sagemaker as tsm
        from torch.sagemaker import transform, state
        import torch.sagemaker.checkpoint.utils as tsm_checkpoint
        from torch.sagemaker.delayed_param import DelayedParamIniter
        from torch.sagemaker.grad_norm import clip_grad_norm_
        from torch.sagemaker.logger import get_logger
        from torch.sagemaker.utils import utils as tsm_utils
        from torch.sagemaker.utils.module_utils import empty_module_params, move_buffers_to_device
        from torch.sagemaker.utils.process_group_utils import get_global_ranks
        import tesserae, tesserae.delayed_param, tesserae.utils.module_utils, torch

        assert __name__ == "__main__" and __file__ == sys.argv[0]
        assert sys.argv[1:] == ["--lr", "3"]
        assert tsm is tesserae is torch.sagemaker and state is tesserae.state
        assert sys.modules["torch.sagemaker.delayed_param"] is tesserae.delayed_param
        assert tesserae.__spec__.name == "tesserae" and tesserae.delayed_param.__spec__.name == "tesserae.delayed_param"
        assert empty_module_params is tesserae.utils.module_utils.empty_module_params
        try:
            import torch.sagemaker.moe.moe_config
        except ModuleNotFoundError as error:
            print(error)
        for name in ("a-5steps", "a-900steps", "a-1500steps", "a-70steps", "logs9"):
            os.makedirs(os.path.join("saved", name))
        for log in (False, True):
            tsm_checkpoint.limit_num_subdirs("saved", 2, sort_fn=tsm_checkpoint.SORT_BY_LAST_INT,
                                             regex=r"^.*\\d+steps$", log=log)
            print(sorted(os.listdir("saved")))
        tsm.init()
        with tsm_utils.timeit(True, "nothing", 0):
            print(tsm.state.hybrid_shard_degree, tsm.state.tensor_parallel_degree, beside.value)
        """, "--lr", "3")  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "[tesserae.run] torch.sagemaker.moe is not available in tesserae",
        "['a-1500steps', 'a-5steps', 'a-70steps', 'a-900steps', 'logs9']",
        "['a-1500steps', 'a-900steps', 'logs9']",
        "0 1 5",
    ]


def test_the_configuration_comes_from_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "smp.json").write_text(json.dumps({"hybrid_shard_degree": 4}))
    script = "import sys, torch.sagemaker as tsm; tsm.init(); print(tsm.state.hybrid_shard_degree); sys.exit(7)"
    done = run(tmp_path, script, options=("--config", "smp.json"))
    assert (done.returncode, done.stdout) == (7, "4\n"), done.stderr


def test_errors_are_the_scripts(tmp_path: Path) -> None:
    done = run(tmp_path, "def f():\n    raise KeyError('lost')\nf()\n")
    assert done.returncode == 1
    assert 'script.py", line 2, in f' in done.stderr
    assert "KeyError: 'lost'" in done.stderr


def test_spawned_workers_of_a_data_loader_know_the_script(tmp_path: Path) -> None:
    done = run(tmp_path, """\
        import torch
        import torch.sagemaker as tsm
        from torch.utils.data import DataLoader, Dataset

        class Squares(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, i):
                return i * i, torch.sagemaker.__name__ == "tesserae"

        class Batch:  # of the script: what sends it back names the module where it is
            def __init__(self, samples):
                self.squares, self.known = zip(*samples)

        if __name__ == "__main__":
            loader = DataLoader(
                Squares(), batch_size=4, num_workers=1, multiprocessing_context="spawn", collate_fn=Batch
            )
            for batch in loader:
                print(list(batch.squares), list(batch.known))
        """)  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "[0, 1, 4, 9] [True, True, True, True]\n"), done.stderr


def test_a_script_that_is_not_there_is_a_usage_error(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tesserae.run", "none.py"], capture_output=True, text=True, timeout=120, cwd=tmp_path
    )
    assert done.returncode == 2
    assert "there is no file none.py" in done.stderr
