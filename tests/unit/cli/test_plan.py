"""What `nightshift up` makes of its options."""

import pytest

from services.cli.up.plan import (
    Address,
    ModelPlan,
    PlanError,
    choose_engine,
    deal_executors,
    looks_like_path,
    parse_address,
    parse_models,
)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("127.0.0.2:0", Address("127.0.0.2", 0)),
        ("localhost:1", Address("127.0.0.1", 1)),
        ("[::1]:65535", Address("::1", 65535)),
    ],
)
def test_a_loopback_address_is_taken(text: str, address: Address) -> None:
    assert parse_address("--listen", text) == address
    assert not address.is_exposed


@pytest.mark.parametrize("text", ["8000", ":8000", "127.0.0.1", "127.0.0.1:x", "127.0.0.1:65536"])
def test_what_is_no_address_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match="HOST:PORT"):
        parse_address("--listen", text)


@pytest.mark.parametrize("text", ["0.0.0.0:8000", "[::]:8000", "10.1.2.3:8000"])
def test_an_address_that_others_reach_is_known_as_one(text: str) -> None:
    assert parse_address("--grpc", text).is_exposed


def test_a_name_is_refused_with_what_to_use() -> None:
    with pytest.raises(PlanError, match=r"127\.0\.0\.1:8000 or 0\.0\.0\.0:8000"):
        parse_address("--grpc", "example.org:8000")


def test_an_ipv6_host_is_written_in_brackets() -> None:
    assert str(Address("::1", 80)) == "[::1]:80"


def test_a_model_alone_means_vllm() -> None:
    assert choose_engine(None, ["m=/x"]) == "vllm"
    assert choose_engine("simulated", []) == "simulated"


def test_neither_engine_nor_model_is_refused_with_both_commands() -> None:
    with pytest.raises(PlanError) as refusal:
        choose_engine(None, [])
    assert "nightshift up --model NAME=PATH" in str(refusal.value)
    assert "nightshift up --engine simulated" in str(refusal.value)


def test_vllm_without_a_model_is_refused() -> None:
    with pytest.raises(PlanError, match="--model NAME=PATH"):
        choose_engine("vllm", [])


def test_simulated_without_a_model_serves_simulated() -> None:
    assert parse_models("simulated", [], [], []) == (ModelPlan(name="simulated"),)


def test_simulated_takes_a_name_with_and_without_a_path() -> None:
    models = parse_models("simulated", ["a", "b=/nowhere"], [], [])
    assert models == (ModelPlan(name="a"), ModelPlan(name="b", path="/nowhere"))


def test_a_hugging_face_name_stands_for_itself() -> None:
    (model,) = parse_models("vllm", ["org/model"], [], [])
    assert (model.name, model.path) == ("org/model", "org/model")


def test_a_path_may_hold_an_equals_sign() -> None:
    (model,) = parse_models("vllm", ["m=/a=b"], [], [])
    assert model.path == "/a=b"


@pytest.mark.parametrize(
    ("models", "what"),
    [
        (["m=/a", "m=/b"], "twice"),
        (["=/a"], "name"),
        (["m="], "NAME=PATH"),
        (["/models/x"], "my-model=/models/x"),
        (["a b=/x"], "name"),
        (["m=/a,b"], "comma"),
    ],
)
def test_a_model_that_cannot_be_read_is_refused(models: list[str], what: str) -> None:
    with pytest.raises(PlanError, match=what):
        parse_models("vllm", models, [], [])


def test_engine_arguments_go_to_their_model_unread() -> None:
    models = parse_models(
        "vllm",
        ["llama:8b=/x", "llama=/y"],
        ["llama:8b: --dtype bfloat16 --x 'a: b'", "llama:--seed 1"],
        [],
    )
    assert [model.engine_args for model in models] == ["--dtype bfloat16 --x 'a: b'", "--seed 1"]


@pytest.mark.parametrize("value", ["--dtype float32", "other: --dtype float32"])
def test_engine_arguments_for_nobody_are_refused_with_the_names(value: str) -> None:
    with pytest.raises(PlanError, match="one of m"):
        parse_models("vllm", ["m=/x"], [value], [])


def test_engine_arguments_with_an_open_quote_are_refused() -> None:
    with pytest.raises(PlanError, match="no closing quotation"):
        parse_models("vllm", ["m=/x"], ["m: --x 'a"], [])


@pytest.mark.parametrize("text", ["/a", "./a", "../a", "~/a", "a/b/c", "."])
def test_paths_are_told_from_hugging_face_names(text: str) -> None:
    assert looks_like_path(text)
    assert not looks_like_path("org/model")
    assert not looks_like_path("model")


A = ModelPlan(name="a")
B = ModelPlan(name="b")


def dealt(
    models: list[ModelPlan], executors: int, visible: list[str]
) -> list[tuple[str, str, tuple[str, ...] | None]]:
    plans = deal_executors(models, executors, visible)
    return [(plan.name, plan.model.name, plan.gpus) for plan in plans]


def test_without_gpus_nothing_is_said_about_them() -> None:
    assert dealt([A, B], 2, []) == [
        ("executor-0", "a", None),
        ("executor-1", "a", None),
        ("executor-2", "b", None),
        ("executor-3", "b", None),
    ]


def test_gpus_are_dealt_evenly_in_order() -> None:
    assert dealt([A, B], 2, list("01234567")) == [
        ("executor-0", "a", ("0", "1")),
        ("executor-1", "a", ("2", "3")),
        ("executor-2", "b", ("4", "5")),
        ("executor-3", "b", ("6", "7")),
    ]


@pytest.mark.parametrize("visible", [["0"], ["0", "1", "2"]])
def test_gpus_that_do_not_divide_are_refused_with_what_to_change(visible: list[str]) -> None:
    with pytest.raises(PlanError, match=r"(?s)--executors.*--gpus 'a: 0"):
        deal_executors([A, B], 1, visible)


def test_named_gpus_go_where_they_are_named_and_the_rest_is_dealt() -> None:
    models = list(parse_models("vllm", ["a=/x", "b=/y"], [], ["b: 0, 3"]))
    assert dealt(models, 2, list("0123")) == [
        ("executor-0", "a", ("1",)),
        ("executor-1", "a", ("2",)),
        ("executor-2", "b", ("0",)),
        ("executor-3", "b", ("3",)),
    ]


def test_two_models_may_share_a_named_gpu() -> None:
    models = list(parse_models("vllm", ["a=/x", "b=/y"], [], ["a: 0", "b: 0"]))
    assert [gpus for _, _, gpus in dealt(models, 1, ["0", "1"])] == [("0",), ("0",)]


def test_a_gpu_that_is_not_there_is_refused() -> None:
    (model,) = parse_models("vllm", ["a=/x"], [], ["a: 7"])
    with pytest.raises(PlanError, match="no GPU 7 here; visible are: 0, 1"):
        deal_executors([model], 1, ["0", "1"])


def test_named_gpus_must_divide_too() -> None:
    (model,) = parse_models("vllm", ["a=/x"], [], ["a: 0,1,2"])
    with pytest.raises(PlanError, match=r"3 GPU.s. cannot be dealt evenly to 2"):
        deal_executors([model], 2, ["0", "1", "2"])


@pytest.mark.parametrize("text", ["a: ", "a: 0,0", "a: 0,,1"])
def test_gpus_that_cannot_be_read_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="--gpus"):
        parse_models("vllm", ["a=/x"], [], [text])


def test_tokens_are_said_for_each_model() -> None:
    models = parse_models("simulated", ["a", "b"], [], [], ["b: 512"])
    assert [model.default_max_tokens for model in models] == [None, 512]


@pytest.mark.parametrize("text", ["a: many", "a: 0", "a: -1", "a: 1.5", "a:", "a: 9999999999"])
def test_tokens_are_a_whole_number(text: str) -> None:
    with pytest.raises(PlanError, match="'NAME: 512'"):
        parse_models("simulated", ["a"], [], [], [text])


def test_tokens_of_no_model() -> None:
    with pytest.raises(PlanError, match="NAME one of a"):
        parse_models("simulated", ["a"], [], [], ["b: 5"])
