"""YAML files that build on others."""

from pathlib import Path

import pytest

from mars_hf import MARSTrainingArguments
from mars_hf.training.config import parse_config


def write(folder, **files):
    for name, text in files.items():
        path = folder / f"{name.replace('__', '/')}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return str(folder / "run.yaml")


def parse(path, *options):
    return parse_config([MARSTrainingArguments], ["--config", path, *options])[0]


def test_later_files_win_and_the_files_own_keys_win_over_all(tmp_path):
    """Names count from the folder of the file they stand in, and two files may build on the same one."""
    path = write(
        tmp_path,
        run="base: [sizes/small.yaml, sizes/rule.yaml]\nlr_1d: 0.5\n",
        sizes__small="base: ../all.yaml\nmars_gamma: 0.1\nlr_1d: 0.4\nmax_steps: 7\n",
        sizes__rule="base: ../all.yaml\nmars_gamma: 0.2\n",
        all="output_dir: runs/x\nlr_scheduler_kwargs: {min_lr: 0.1}\nmax_steps: 9\n",
    )
    args = parse(path)
    values = (args.lr_1d, args.mars_gamma, args.max_steps, args.lr_scheduler_kwargs, args.output_dir)
    assert values == (0.5, 0.2, 9, {"min_lr": 0.1}, "runs/x"), "lr_1d, mars_gamma, max_steps, kwargs, output_dir"
    Path(path).write_text(Path(path).read_text().replace("lr_1d: 0.5", "lr_1d: null"))
    assert parse(path).lr_1d is None, "null takes back what the files below say"
    assert parse(path, "--lr_1d", "0.6").lr_1d == 0.6, "the command line wins over every file"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (
            {"run": "base: none.yaml\n"},
            r"config='\S+none.yaml', a base of '\S+run.yaml', cannot be read: ",
        ),
        (
            {"run": "base: other.yaml\n", "other": "base: run.yaml\n"},
            r"other.yaml: base='run.yaml' builds on this",
        ),
        ({"run": "base: run.yaml\n"}, r"run.yaml: base='run.yaml' builds on this file itself, remove it from one"),
        ({"run": "base: 3\n"}, r"run.yaml: base=\[?3\]? must be the name of a YAML file or a list of names"),
        ({"run": "base: [{a: 1}]\n"}, r"run.yaml: base=\[\{'a': 1\}\] must be the name"),
        (
            {"run": "base: other.yaml\n", "other": "lr_2d: 1\n"},
            r"other.yaml: unknown key 'lr_2d', did you mean",
        ),
        ({"run": "base: other.yaml\nlearning_rate: null\n", "other": "learning_rate: 1\n"}, "learning_rate=null is no"),
        ({"run": "bas: other.yaml\n"}, r"run.yaml: unknown key 'bas', did you mean 'base'"),
        (
            {"run": "base: other.yaml\n", "other": "- 1\n"},
            r"other.yaml', a base of '\S+run.yaml', must hold",
        ),
    ],
)
def test_errors_are_one_line_and_name_the_file(tmp_path, files, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(write(tmp_path, **files))
    assert "\n" not in str(error.value)
