"""What `LSTM` refuses: the exception type, that of nn.LSTM where it refuses too, and what the text says."""

from __future__ import annotations

import warnings
from inspect import signature

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

from opwright_ops.lstm import LSTM
from opwright_ops.lstm.refusals import _OTHER_NAMES

X = torch.zeros(5, 2, 3)
H_0 = C_0 = torch.zeros(1, 2, 4)
PACKED = pack_padded_sequence(X, [5, 3])

# The arguments, the exception, what the text says in this order.
SAME_CONSTRUCTORS = [
    ({"input_size": 0}, ValueError, "`input_size` must be greater than zero", "0", "1, 2, ..."),
    ({"input_size": -1}, ValueError, "`input_size` must be greater than zero", "-1"),
    ({"input_size": 3.0}, TypeError, "`input_size` must be an int", "float 3.0", "`input_size=3`"),
    ({"input_size": "a"}, TypeError, "`input_size` must be an int", "str 'a'"),
    ({"hidden_size": 0}, ValueError, "`hidden_size` must be greater than zero"),
    ({"hidden_size": 4.5}, TypeError, "`hidden_size` must be an int", "float 4.5"),
    ({"num_layers": 0}, ValueError, "`num_layers` must be greater than zero"),
    ({"num_layers": 1.5}, TypeError, "`num_layers` must be an int"),
    ({"num_layers": "a"}, TypeError, "`num_layers` must be an int"),
    ({"proj_size": -1}, ValueError, "`proj_size` must be smaller than `hidden_size`", "-1", "0 to 3"),
    ({"proj_size": 4}, ValueError, "`proj_size` must be smaller than `hidden_size`", "4", "0 to 3"),
    ({"proj_size": 1.5}, TypeError, "`proj_size` must be an int"),
    ({"bias": 1}, TypeError, "`bias` must be a bool", "int 1", "`bias=True`"),
    ({"batch_first": 0}, TypeError, "`batch_first` must be a bool", "int 0", "`batch_first=False`"),
    ({"dropout": 1.5}, ValueError, "`dropout` must be a probability", "float 1.5", "0 to 1"),
    ({"dropout": -0.1}, ValueError, "`dropout` must be a probability"),
    ({"dropout": float("nan")}, ValueError, "`dropout` must be a probability"),
    ({"dropout": True}, ValueError, "`dropout` must be a probability", "bool True"),
    ({"dropout": "a"}, ValueError, "`dropout` must be a probability", "str 'a'"),
    ({"dropout": [0.1]}, TypeError, "`dropout` must be a probability", "list"),
    ({"dtype": torch.int64}, RuntimeError, "`dtype` must be a floating-point type", "torch.int64"),
    ({"dtype": "float32"}, TypeError, "dtype"),
    ({"device": "nowhere"}, RuntimeError, "nowhere"),
    ({"size": 3}, TypeError, "size"),
]
OPTIONS = [
    ({"dtype": torch.complex64}, TypeError, "`dtype` must be a floating-point type"),
    ({"activation": "relu"}, ValueError, "`activation` is unknown", "'relu'", '"soft" or "hard"'),
    ({"memory": "none"}, ValueError, "`memory` is unknown", "'none'", '"default" or "recompute"'),
    ({"slope": 0.2}, ValueError, "`slope` belongs to the hard sigmoid", '`activation="hard", slope=0.2`'),
    (
        {"activation": "hard", "slope": 0},
        ValueError,
        "`slope` must be greater than zero",
        "0.125, 0.2, 1 / 6",
    ),
    ({"activation": "hard", "slope": "steep"}, TypeError, "`slope` must be a number", "str 'steep'"),
    ({"clip": 0.0}, ValueError, "`clip` must be greater than zero", "0.0", "or None"),
    ({"clip": -1}, ValueError, "`clip` must be greater than zero", "-1"),
    ({"clip": float("inf")}, ValueError, "`clip` must be greater than zero", "inf"),
    ({"clip": True}, TypeError, "`clip` must be a number", "bool True"),
    ({"peephole": 1}, TypeError, "`peephole` must be a bool", "int 1", "`peephole=True`"),
    ({"layer_norm": "no"}, TypeError, "`layer_norm` must be a bool", "str 'no'"),
    ({"coupled": None}, TypeError, "`coupled` must be a bool"),
    ({"return_cell": 1}, TypeError, "`return_cell` must be a bool"),
    (
        {"return_cell": "last"},
        TypeError,
        '`return_cell` must be a bool, or "all" for every layer',
        "str 'last'",
        "`return_cell=True`",
    ),
    (
        {"activation": "tanh"},
        ValueError,
        "`activation` is unknown",
        'or "hard_sigmoid" or "hard_tanh"',
        '`activation="soft"`',
    ),
    (
        {"activation": "hard_tanh", "slope": 0.2},
        ValueError,
        "`slope` belongs to the hard sigmoid",
        'activation  "hard_tanh"',
    ),
    ({"reverse": 1}, TypeError, "`reverse` must be a bool", "int 1", "`reverse=True`"),
    (
        {"reverse": True, "bidirectional": True},
        ValueError,
        "`reverse` is for one direction, and `bidirectional` has both",
        "`bidirectional=False`",
    ),
    (
        {"layer_norm": True, "hidden_size": 1},
        ValueError,
        "`layer_norm` makes a cell of one element 0",
        "2 or more",
    ),
    ({"zoneout": 1.0}, ValueError, "`zoneout` must be a probability below 1", "1.0", "0 <= p < 1"),
    ({"zoneout": (0.1, -0.1)}, ValueError, "`zoneout` must be a probability below 1", "(0.1, -0.1)"),
    ({"zoneout": (0.1, 0.1, 0.1)}, ValueError, "`zoneout` must be a number, or a pair (h, c)"),
    ({"zoneout": "much"}, TypeError, "`zoneout` must be a number, or a pair (h, c)", "str 'much'"),
    ({"zoneout": float("nan")}, ValueError, "`zoneout` must be"),
    ({"weight_dropout": 1}, ValueError, "`weight_dropout` must be a probability below 1"),
    ({"weight_dropout": (0.1, 0.1)}, ValueError, "`weight_dropout` must be a number"),
    ({"weight_dropout": True}, TypeError, "`weight_dropout` must be a number"),
    ({"variational_dropout": (0.1, 2)}, ValueError, "`variational_dropout` must be a probability below 1"),
    (
        {"variational_dropout": None},
        TypeError,
        "`variational_dropout` must be a number, or a pair (input, recurrent)",
    ),
    (
        {"forget_bias": 1.0, "bias": False},
        ValueError,
        "`forget_bias` is the start of a bias, and there is none",
    ),
    (
        {"forget_bias": 1.0, "coupled": True},
        ValueError,
        "`forget_bias` has no effect on a coupled forget gate",
    ),
    ({"forget_bias": "one"}, TypeError, "`forget_bias` must be a number", "`forget_bias=1.0`"),
    ({"forget_bias": float("inf")}, ValueError, "`forget_bias` must be a number"),
]
SAME_CALLS = [
    ((torch.zeros(3),), ValueError, "`input` has the wrong number of dimensions", "f32[3] cpu", "3, or 2"),
    ((X[None],), ValueError, "`input` has the wrong number of dimensions", "f32[1, 5, 2, 3] cpu"),
    ((X.double(),), ValueError, "`input` must have the type of the weights", "f64[5, 2, 3] cpu", "f32[16, 3] cpu",
     "`input.to(torch.float32)`, or `lstm.to(torch.float64)`"),
    ((X.long(),), ValueError, "`input` must have the type of the weights", "int64[5, 2, 3] cpu"),
    ((torch.zeros(5, 2, 4),), RuntimeError, "`input` must have `input_size` as its last size", "[..., 3]"),
    ((X.to("meta"),), RuntimeError, "`input` must be on the device of the weights", "meta", '`input.to("cpu")`'),
    ((X, (H_0, C_0, C_0)), RuntimeError, "`hx` must be a pair (h_0, c_0)", "3 of them"),
    ((X, 5), TypeError, "`hx` must be a pair (h_0, c_0)", "int 5"),
    ((X, torch.stack([H_0, C_0])), TypeError, "`hx` must be a pair (h_0, c_0)", "f32[2, 1, 2, 4] cpu"),
    ((X, (H_0[:, :1], C_0)), RuntimeError, "`h_0` has the wrong shape", "f32[1, 1, 4] cpu", "[1, 2, 4]"),
    ((X, (H_0, C_0[..., :3])), RuntimeError, "`c_0` has the wrong shape", "f32[1, 2, 3] cpu", "[1, 2, 4]"),
    ((X, (H_0.repeat(2, 1, 1), C_0)), RuntimeError, "`h_0` has the wrong shape", "[1, 2, 4]"),
    ((X, (H_0[0], C_0)), RuntimeError, "`h_0` has the wrong number of dimensions", "`h_0.unsqueeze(1)`"),
    ((X[:, 0], (H_0, C_0)), RuntimeError, "`h_0` has the wrong number of dimensions", "`h_0.squeeze(1)`"),
    ((X, (H_0.double(), C_0)), RuntimeError, "`h_0` must have the type of the weights", "f64", "`h_0.to(torch.float32)`"),
    ((X, (H_0, C_0.half())), RuntimeError, "`c_0` must have the type of the weights", "f16"),
    ((X, (H_0.to("meta"), C_0.to("meta"))), RuntimeError, "`h_0` must be on the device of the weights", '`h_0.to("cpu")`'),
    ((PACKED._replace(data=torch.zeros(8, 4)),), RuntimeError, "`input.data` must have `input_size`", "[..., 3]"),
    ((PACKED, (H_0[:, :1], C_0)), RuntimeError, "`h_0` has the wrong shape", "[1, 2, 4]"),
    ((PACKED, (H_0.double(), C_0)), RuntimeError, "`h_0` must have the type of the weights"),
    ((PACKED._replace(batch_sizes=torch.tensor([1, 2, 2, 2, 1])),), RuntimeError, "`input.batch_sizes` must decrease"),
    ((PACKED._replace(batch_sizes=torch.tensor([2, 2, 2, 2, 1])),), RuntimeError, "`input.batch_sizes`", "rows", "8"),
    ((PackedSequence(X, torch.tensor([2, 2, 1])),), RuntimeError, "`input.data` has the wrong number of dimensions"),
]  # fmt: skip
# Where nn.LSTM computes something, or stumbles over an AttributeError or IndexError.
CALLS = [
    (([[1.0]],), {}, TypeError, "`input` must be a tensor or a PackedSequence", "list [[1.0]]", "pack_sequence"),
    ((X, (H_0, None)), {}, TypeError, "`c_0` must be a tensor", "NoneType None", "`lstm(input)` starts from zeros"),
    ((X, (H_0,)), {}, RuntimeError, "`hx` must be a pair (h_0, c_0)", "1 of them"),
    ((PACKED, (H_0, C_0[:, :1])), {}, RuntimeError, "`c_0` has the wrong shape"),
    ((PACKED.double(),), {}, ValueError, "`input.data` must have the type of the weights"),
    ((X,), {"lengths": [5, 6]}, ValueError, "`lengths` must not be above the input's steps", "5 to 6", "0 to 5"),
    ((X,), {"lengths": [-1, 2]}, ValueError, "`lengths` must not be negative", "-1 to 2", "`lengths.clamp(0, 5)`"),
    ((X,), {"lengths": [5]}, ValueError, "`lengths` must have one length for each entry", "int64[1] cpu", "[2]"),
    ((X[:, 0],), {"lengths": [5]}, ValueError, "`lengths` must have one length for each entry", "[]"),
    ((X,), {"lengths": [5.0, 3.0]}, TypeError, "`lengths` must be whole numbers", "list [5.0, 3.0]"),
    ((X,), {"lengths": torch.tensor([5.0, 3])}, TypeError, "`lengths` must be whole numbers", "f32[2] cpu"),
    ((X,), {"lengths": torch.ones(2).bool()}, TypeError, "`lengths` must be whole numbers"),
    ((X,), {"lengths": ["a", "b"]}, TypeError, "`lengths` must be whole numbers"),
    ((X,), {"lengths": [3, 5], "enforce_sorted": True}, RuntimeError, "`lengths` must be in decreasing order", "[3, 5]"),
    ((X,), {"enforce_sorted": True}, ValueError, "`enforce_sorted` is about `lengths`, and there are none"),
    ((PACKED,), {"lengths": [5, 3]}, ValueError, "`lengths` are those of the PackedSequence"),
    ((X,), {"batch_first": True}, TypeError,
     "`batch_first` is an argument of the constructor", "`LSTM(..., batch_first=True)`"),
    ((X,), {"initial_state": [H_0, C_0]}, TypeError,
     "`initial_state` is an argument of Keras's LSTM", "`lstm(input, (h_0, c_0))`"),
    ((X,), {"initial_h": H_0}, TypeError, "`initial_h` is an argument of ONNX's LSTM", "`lstm(input, (h_0, c_0))`"),
    ((X,), {"init_states": (H_0, C_0)}, TypeError,
     "`init_states` is an argument of caiman-asr's LSTM", "`lstm(input, (h_0, c_0))`"),
    ((X,), {"sequence_lens": [5, 2]}, TypeError,
     "`sequence_lens` is an argument of ONNX's LSTM", "`lstm(input, lengths=...)`"),
    ((X,), {"mask": X > 0}, TypeError, "`mask` is an argument of Keras's LSTM", "`lstm(input, lengths=mask.sum(1))`"),
    ((X,), {"training": True}, TypeError, "`training` is an argument of Keras's LSTM", "`lstm.train()`"),
    ((X,), {"length": [5, 2]}, TypeError, "`length` is unknown", "list [5, 2]", "`lengths=...`"),
    ((X,), {"reset": torch.zeros(5, 2)}, TypeError, "`reset` must be a tensor of bools", "`reset.bool()`"),
    ((X,), {"reset": [True] * 5}, TypeError, "`reset` must be a tensor of bools", "list"),
    ((X,), {"reset": torch.zeros(2, 5).bool()}, ValueError, "`reset` must have one element for each step", "[5, 2]", "`reset.mT`"),
    ((X[:, 0],), {"reset": torch.zeros(5, 1).bool()}, ValueError, "`reset` must have one element", "[5]"),
    ((X,), {"reset": torch.zeros(5, 2, device="meta").bool()}, ValueError, "`reset` must be on the device of the input"),
    ((PACKED,), {"reset": torch.zeros(4, 2).bool()}, ValueError, "`reset` must have one element", "[5, 2]"),
]  # fmt: skip


# An option of another library, and what to write in place of it; `None` is the default.
OTHER_NAMES = [
    ("caiman-asr", "hard", True, {"activation": "hard"}),
    ("caiman-asr", "hard", False, {"activation": "soft"}),
    ("caiman-asr", "hard_activation", True, {"activation": "hard"}),
    ("caiman-asr", "hard_activation_functions", True, {"activation": "hard"}),
    ("caiman-asr", "rw_dropout", 0.1, {"weight_dropout": 0.1}),
    ("caiman-asr", "forget_gate_bias", 1.0, {"forget_bias": 1.0}),
    ("caiman-asr", "batch_norm", True, {"layer_norm": True}),
    ("haste", "return_state_sequence", True, {"return_cell": True}),
    ("haste", "num_units", 4, {"hidden_size": 4}),
    ("ONNX", "activations", ["HardSigmoid", "Tanh", "Tanh"], {"activation": "hard_sigmoid", "slope": 0.2}),
    ("ONNX", "activations", ["Sigmoid", "Relu", "Tanh"], {"activation": "soft"}),
    ("ONNX", "activations", "Sigmoid", {"activation": "soft"}),
    ("ONNX", "direction", "reverse", {"reverse": True}),
    ("ONNX", "direction", "bidirectional", {"bidirectional": True}),
    ("ONNX", "input_forget", 1, {"coupled": True}),
    ("ONNX", "layout", 1, {"batch_first": True}),
    ("Keras", "units", 4, {"hidden_size": 4}),
    ("Keras", "recurrent_activation", "hard_sigmoid", {"activation": "hard_sigmoid", "slope": 1 / 6}),
    ("Keras", "recurrent_activation", "sigmoid", {"activation": "soft"}),
    ("Keras", "use_bias", False, {"bias": False}),
    ("Keras", "unit_forget_bias", True, {"forget_bias": 1.0}),
    ("Keras", "unit_forget_bias", False, {"forget_bias": None}),
    ("Keras", "recurrent_dropout", 0.2, {"variational_dropout": (0.0, 0.2)}),
    ("Keras", "go_backwards", True, {"reverse": True}),
    ("Keras", "time_major", False, {"batch_first": True}),
]
# The same, where nothing is to be written, or no option of the constructor.
OTHER_NAMES_OMITTED = [
    ("caiman-asr", "quantize", True, '`lstm_step(lstm, weights="int8")`'),
    ("caiman-asr", "custom_lstm", True, "omit it"),
    ("ONNX", "activation_alpha", [0.2], '`activation="hard_sigmoid", slope=...`'),
    ("ONNX", "activation_beta", [0.5], "omit it: the hard sigmoid is 0.5 at 0"),
    ("ONNX", "direction", "forward", "omit it: forward is the default"),
    ("Keras", "return_sequences", True, "omit it: the output has all steps"),
    ("Keras", "return_state", True, "omit it: the result is (output, (h_n, c_n))"),
    ("Keras", "stateful", True, "`output, state = lstm(input, state)`"),
    ("Keras", "unroll", True, "omit it"),
    ("Keras", "use_cudnn", True, "`tier=...` for a GPU"),
    ("Keras", "implementation", 1, "`tier=...` for a GPU"),
]
UNKNOWN = [
    ({"hidden": 4}, "`hidden` is unknown", "int 4", "`hidden_size=...`"),
    ({"zone_out": 0.1}, "`zone_out` is unknown", "`zoneout=...`"),
    ({"foo": 1}, "`foo` is unknown", "int 1", "`help(opwright_ops.LSTM)` has all"),
    ({"lengths": [5, 2]}, "`lengths` is an argument of a call", "`lstm(input, lengths=...)`"),
]


def construct(cls, options):
    return cls(**{"input_size": 3, "hidden_size": 4, **options})


def check_text(error: BaseException, fragments) -> None:
    text = str(error)
    for fragment in fragments:
        assert fragment in text, text
        text = text[text.index(fragment) :]


def rows(cases):
    return [(given, kind, fragments) for given, kind, *fragments in cases]


@pytest.mark.parametrize(("options", "kind", "fragments"), rows(SAME_CONSTRUCTORS))
def test_constructors_that_nn_lstm_refuses(options, kind, fragments) -> None:
    with pytest.raises(kind) as theirs:
        construct(nn.LSTM, options)
    with pytest.raises(kind) as error:
        construct(LSTM, options)
    assert error.type is theirs.type
    check_text(error.value, fragments)


@pytest.mark.parametrize(("options", "kind", "fragments"), rows(OPTIONS))
def test_options(options, kind, fragments) -> None:
    with pytest.raises(kind) as error:
        construct(LSTM, options)
    assert error.type is kind
    check_text(error.value, fragments)


@pytest.mark.parametrize(("library", "name", "value", "here"), OTHER_NAMES, ids=str)
def test_names_of_other_libraries(library, name, value, here) -> None:
    """The hint begins with what the constructor takes in place of the name."""
    with pytest.raises(TypeError) as error:
        construct(LSTM, {name: value})
    text, _, hint = str(error.value).partition("hint: ")
    assert text.startswith(f"`LSTM`: `{name}` is an argument of {library}'s LSTM, not of this one\n")
    assert eval(f"dict({hint.split('`')[1]})") == here
    construct(LSTM, here)


@pytest.mark.parametrize(("library", "name", "value", "fragment"), OTHER_NAMES_OMITTED, ids=str)
def test_names_of_other_libraries_without_an_option(library, name, value, fragment) -> None:
    with pytest.raises(TypeError) as error:
        construct(LSTM, {name: value})
    check_text(error.value, [f"`{name}` is an argument of {library}'s LSTM, not of this one", fragment])


def test_all_names_of_other_libraries_are_tested() -> None:
    in_calls = {name for _, arguments, *_ in CALLS for name in arguments}
    tested = {name for _, name, *_ in [*OTHER_NAMES, *OTHER_NAMES_OMITTED]} | in_calls
    assert set(_OTHER_NAMES) - tested == {"initial_c"}  # as `initial_h`


def test_no_name_of_another_library_is_one_of_this() -> None:
    assert not set(_OTHER_NAMES) & {*signature(LSTM).parameters, *signature(LSTM.forward).parameters}


@pytest.mark.parametrize(("options", "fragments"), [(options, fragments) for options, *fragments in UNKNOWN])
def test_unknown_names(options, fragments) -> None:
    with pytest.raises(TypeError) as error:
        construct(LSTM, options)
    check_text(error.value, fragments)


@pytest.mark.parametrize(("args", "kind", "fragments"), rows(SAME_CALLS))
def test_calls_that_nn_lstm_refuses(args, kind, fragments) -> None:
    with pytest.raises(kind) as theirs:
        nn.LSTM(3, 4)(*args)
    with pytest.raises(kind) as error:
        LSTM(3, 4)(*args)
    assert error.type is theirs.type
    check_text(error.value, fragments)


@pytest.mark.parametrize(
    ("args", "arguments", "kind", "fragments"), [(a, k, kind, fragments) for a, k, kind, *fragments in CALLS]
)
def test_calls(args, arguments, kind, fragments) -> None:
    with pytest.raises(kind) as error:
        LSTM(3, 4)(*args, **arguments)
    assert error.type is kind
    check_text(error.value, fragments)


def test_a_whole_text() -> None:
    with pytest.raises(RuntimeError) as error:
        LSTM(3, 4, batch_first=True)(X, (torch.zeros(2, 1, 4), C_0))
    assert str(error.value) == (
        "`LSTM`: `h_0` has the wrong shape\n"
        "\n"
        "  got       f32[2, 1, 4] cpu\n"
        "  expected  [1, 5, 4]\n"
        "\n"
        "hint: sizes of a state are [layers x directions, batch, features], also with `batch_first=True`"
    )


def test_autocast_takes_other_types_but_float64() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert LSTM(3, 4)(X.half())[0].dtype == torch.bfloat16
        with pytest.raises(ValueError, match="`input` must have the type of the weights"):
            LSTM(3, 4)(X.double())


def test_dropout_without_a_second_layer_warns_at_the_call() -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        LSTM(3, 4, dropout=0.5)
    (warning,) = found
    assert warning.filename == __file__
    assert str(warning.message) == "`LSTM`: `dropout=0.5` has no effect: it lies between layers, and `num_layers=1`"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"activation": "hard", "peephole": True}, 'activation="hard", peephole=True'),
        ({"layer_norm": True, "coupled": True, "clip": 2.0}, "layer_norm=True, coupled=True, clip=2.0"),
        ({"zoneout": 0.1, "return_cell": True}, "zoneout=(0.1, 0.1), return_cell=True"),
        ({"activation": "hard_tanh", "return_cell": "all"}, 'activation="hard_tanh", return_cell="all"'),
        ({"reverse": True}, "reverse=True"),
        ({"weight_dropout": 0.1}, "`lstm.eval().to_torch()`"),
        ({"variational_dropout": 0.1}, "`lstm.eval().to_torch()`"),
    ],
)
def test_what_nn_lstm_lacks_does_not_become_one(options, named) -> None:
    with pytest.raises(ValueError) as error:
        LSTM(3, 4, **options).to_torch()
    check_text(error.value, ["`to_torch` cannot make an nn.LSTM of this one", named])


def test_what_is_no_nn_lstm_is_not_taken() -> None:
    with pytest.raises(TypeError, match=r"`from_torch` takes an nn\.LSTM"):
        LSTM.from_torch(nn.GRU(3, 4))
    with pytest.raises(ValueError, match="`forget_bias` is where a bias starts, and this one is given"):
        LSTM.from_torch(nn.LSTM(3, 4), forget_bias=1.0)
    module = nn.utils.parametrizations.weight_norm(nn.LSTM(3, 4), "weight_hh_l0")
    with pytest.raises(ValueError, match="computed  weight_hh_l0"):
        LSTM.from_torch(module)


@pytest.mark.parametrize("dtype", [torch.int64, torch.complex64], ids=str)
def test_weights_are_not_made_integers_or_complex(dtype: torch.dtype) -> None:
    with pytest.raises(ValueError, match=r"hint: `input\.to\(torch\.float32\)`$"):
        LSTM(3, 4)(X.to(dtype))
