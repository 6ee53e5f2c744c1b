"""Which models a suite serves, and who has which GPU: what is understood, and what is refused by name."""

from __future__ import annotations

import re

import pytest

from common import model_flags
from common.config import TASKS, GatewayConfig, ServeConfig, load


def test_models_are_named_in_their_order() -> None:
    models = model_flags.parse_models(["emb=BAAI/bge-small-en-v1.5", "rank.2=./models/a=b"])
    assert list(models.items()) == [("emb", "BAAI/bge-small-en-v1.5"), ("rank.2", "./models/a=b")]


def test_a_model_without_a_name_is_one_and_its_path_may_hold_anything() -> None:
    config = load(ServeConfig, ["./models/a=b", "--port", "9001"], {})
    assert (config.model, config.models, config.gpus) == ("./models/a=b", (), ())


def test_one_model_is_a_list_of_one() -> None:
    alone = load(ServeConfig, ["x", "--task", "score"], {}).planned_models()
    named = load(ServeConfig, ["A=x", "--task", "A:score", "--gpus", "A:0"], {}).planned_models()
    assert alone == [model_flags.PlannedModel(None, "x", "score", None)]
    assert named == [model_flags.PlannedModel("A", "x", "score", (0,))]


def test_several_models_come_by_flags_or_by_variables() -> None:
    by_flags = load(ServeConfig, ["A=x", "B=y", "--gpus", "A:0-1", "B:2"], {})
    by_variables = load(ServeConfig, [], {"HEDGEROW_MODELS": "A=x B=y", "HEDGEROW_GPUS": "A:0-1 B:2"})
    assert by_flags == by_variables
    assert (by_flags.models, by_flags.gpus) == (("A=x", "B=y"), ("A:0-1", "B:2"))


def test_a_gateway_is_told_names_alone() -> None:
    assert load(GatewayConfig, [], {"HEDGEROW_MODELS": "A B"}).models == ("A", "B")


@pytest.mark.parametrize(
    ("flags", "tasks"),
    [
        ([], {"A": "auto", "B": "auto"}),
        (["--task", "score"], {"A": "score", "B": "score"}),
        (["--task", "B:score"], {"A": "auto", "B": "score"}),
        (["--task", "embed,B:score"], {"A": "embed", "B": "score"}),
    ],
)
def test_a_task_is_all_models_or_one_of_thems(flags: list[str], tasks: dict[str, str]) -> None:
    config = load(ServeConfig, ["A=x", "B=y", *flags], {})
    assert model_flags.parse_tasks(config.task, ["A", "B"], TASKS) == tasks


def test_gpus_are_numbers_and_ranges() -> None:
    assert model_flags.parse_gpus(["A:0-1", "B:2,4-6,3"], ["A", "B"]) == {"A": [0, 1], "B": [2, 4, 5, 6, 3]}


def planned(gpus: tuple[int, ...] | None) -> model_flags.PlannedModel:
    return model_flags.PlannedModel("B", "x", "auto", gpus)


def test_a_gpus_number_is_its_place_among_those_that_are_visible() -> None:
    assert [model_flags.devices_of(planned(gpus), ["4", "GPU-6f", "7"]) for gpus in ((0, 2), (1,), None)] == [
        ["4", "7"],
        ["GPU-6f"],
        None,
    ]


@pytest.mark.parametrize(
    ("visible", "there"),
    [([], "no GPU is visible"), (["5"], r"1 is visible \(0\)"), (["5", "6"], r"2 are visible \(0 to 1\)")],
)
def test_a_gpu_that_is_not_there_is_refused(visible: list[str], there: str) -> None:
    with pytest.raises(ValueError, match=f"--gpus B:2: no GPU 2; {there}"):
        model_flags.devices_of(planned((2,)), visible)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["A=x", "A=y"], "two models are called A"),
        (["A=x", "y"], "'y': with several models each needs a name"),
        (["x", "y"], "'x': with several models each needs a name"),
        (["A=", "B=y"], "'A=': with several models each needs a name"),
        (["a b=x", "B=y"], "cannot be called 'a b'"),
        (["=x"], "cannot be called ''"),
        (["..=x"], "cannot be called '..'"),
        (["-A=x"], "unrecognized arguments: -A=x"),
        (
            ["metrics=x"],
            "cannot be called metrics: the run folder, which gets a folder of that name, has such a file itself",
        ),
        (["budgets=x"], "cannot be called budgets"),
        (["gateway-0.lock=x"], "cannot be called gateway-0.lock"),
        (["--task", "rank", "x"], "--task 'rank': needs one of auto, embed, score, sparse"),
        (["A=x", "--task", "A:rank"], "--task 'A:rank': needs one of auto, embed, score, sparse"),
        (["A=x", "--task", "C:score"], "--task C:score: no model is called C; there is A"),
        (["A=x", "--gpus", "B:0"], "--gpus B:0: no model is called B; there is A"),
        (["A=x", "B=y", "--gpus", "A:0", "C:1"], "no model is called C; there are A, B"),
        (["x", "--gpus", "A:0"], "no model is called A; there is one model without a name: write NAME=MODEL"),
        (["A=x", "B=y", "--gpus", "A:0-2", "B:2"], "--gpus gives GPU 2 to A and to B"),
        (["A=x", "--gpus", "A:1,1"], "--gpus gives GPU 1 to A and to A"),
        (["A=x", "--gpus", "A:0", "A:1"], "--gpus names A twice"),
        (["A=x", "B=y", "C=z", "--gpus", "B:0"], "--gpus gives no GPU to A and C; add A:NUMBER"),
        (["A=x", "--gpus", "A:3-1"], "3-1 ends before it begins"),
        (["A=x", "--gpus", "A:"], "--gpus 'A:': needs NAME:NUMBERS"),
        (["A=x", "--gpus", "A:all"], "--gpus 'A:all': needs NAME:NUMBERS"),
        (["A=x", "--gpus", "A:-1"], "--gpus 'A:-1': needs NAME:NUMBERS"),
        (["A=x", "--gpus", "0"], "--gpus '0': needs NAME:NUMBERS"),
        (["--gpus", "A:0", "A=x"], "--gpus 'A=x': needs NAME:NUMBERS, as in A:0 or A:0-3,5; give the models before"),
        (["A=x", "--gpus", "A:0", "--device", "cpu"], "--gpus and --device cpu exclude each other"),
        (["A=x", "--gpus", "A:0", "--workers", "2"], "--gpus sets the number of workers"),
        (["A=x", "B=y", "--served-model-name", "C"], "--served-model-name is for a model without a name"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_name(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        load(ServeConfig, flags, {})
    assert ended.value.code == 2
    assert re.search(re.escape(said), capsys.readouterr().err)
