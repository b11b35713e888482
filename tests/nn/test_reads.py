"""Finding weights that model code reads directly: on small modules written for it, and on real ones."""

import pytest
import torch
import torch.nn.functional as F
import transformers as hf
from torch import nn

from hf_lowbit.nn.reads import directly_read, reads_own_weight
from tests.quantizers.architectures import BY_ID


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        # what an initializer does happens before a weight is packed
        self.lin.weight.data.zero_()


class ReadsNumbers(Holder):
    def forward(self, x):
        return F.linear(x, self.lin.weight)


class ReadsDtype(Holder):
    def forward(self, x):
        return self.lin(x.to(self.lin.weight.dtype))


class ReadsIntoAName(Holder):
    def forward(self, x):
        weight = self.lin.weight
        return x @ weight


class ReadsAnItem(Holder):
    def forward(self, x):
        return x @ self.layers[1].weight


class ReadsInAHelper(Holder):
    def forward(self, x):
        return x.to(self.dtype_in)

    @property
    def dtype_in(self):
        return self.lin.weight.dtype


class ReadsDeviceAndNumbers(Holder):
    def forward(self, x):
        return x.to(self.lin.weight.device) @ self.lin.weight


class ReadsInInference(Holder):
    def forward(self, x):
        if self.training:
            return self.lin(x)
        else:
            return x @ self.lin.weight


class ReadsThroughAChild(nn.Module):
    def __init__(self):
        super().__init__()
        self.child = Calls()

    def forward(self, x):
        return x @ self.child.lin.weight


class Inherits(ReadsNumbers):
    pass


class Calls(Holder):
    def forward(self, x):
        return self.lin(x)


class ReadsDevice(Holder):
    def forward(self, x):
        return self.lin(x.to(self.lin.weight.device))


class ReadsInTraining(Holder):
    def forward(self, x):
        if self.training:
            return x @ self.lin.weight
        return self.lin(x)


class ReadsBias(Holder):
    def forward(self, x):
        return self.lin(x) - self.lin.bias


class Assigns(Holder):
    def retie(self, other):
        self.lin.weight = other


class Initializes(Holder):
    def _init_weights(self):
        nn.init.normal_(self.lin.weight)

    def reset_parameters(self):
        self.lin.weight.data.zero_()


class Overrides(ReadsNumbers):
    def forward(self, x):
        return self.lin(x)


class ComparesWithInt8(Holder):
    def forward(self, x):
        if self.lin.weight.dtype != torch.int8:
            x = x.to(self.lin.weight.dtype)
        return self.lin(x)


@pytest.mark.parametrize(
    ("cls", "found"),
    [
        pytest.param(ReadsNumbers, {"lin": "ReadsNumbers"}, id="numbers"),
        pytest.param(ReadsDtype, {"lin": "ReadsDtype"}, id="dtype"),
        pytest.param(ReadsIntoAName, {"lin": "ReadsIntoAName"}, id="alias"),
        pytest.param(ReadsAnItem, {"layers.1": "ReadsAnItem"}, id="item"),
        pytest.param(ReadsInAHelper, {"lin": "ReadsInAHelper"}, id="property"),
        pytest.param(ReadsDeviceAndNumbers, {"lin": "ReadsDeviceAndNumbers"}, id="device-and-numbers"),
        pytest.param(ReadsInInference, {"lin": "ReadsInInference"}, id="inference-branch"),
        pytest.param(ReadsThroughAChild, {"child.lin": "ReadsThroughAChild"}, id="child"),
        pytest.param(Inherits, {"lin": "Inherits"}, id="inherited"),
        pytest.param(Calls, {}, id="calls"),
        pytest.param(ReadsDevice, {}, id="device-only"),
        pytest.param(ReadsInTraining, {}, id="training-branch"),
        pytest.param(ReadsBias, {}, id="bias"),
        pytest.param(Assigns, {}, id="assigns"),
        pytest.param(Initializes, {}, id="initializes"),
        pytest.param(Overrides, {}, id="overridden"),
        pytest.param(ComparesWithInt8, {}, id="knows-int8"),
    ],
)
def test_what_a_module_reads(cls, found):
    assert directly_read(cls()) == found
    wrapped = nn.ModuleDict({"outer": cls()})
    assert directly_read(wrapped) == {f"outer.{name}": reader for name, reader in found.items()}


def test_a_class_without_source_is_passed_over():
    scope = {"nn": nn}
    exec("class Made(nn.Module):\n    def forward(self, x):\n        return x @ self.lin.weight", scope)
    assert directly_read(scope["Made"]()) == {}


class Scaled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Transposed(nn.Linear):
    def forward(self, x):
        return x @ self.weight


class Below(Transposed):
    pass


@pytest.mark.parametrize(
    ("cls", "reads"),
    [
        pytest.param(Scaled, False, id="calls-super"),
        pytest.param(Transposed, True, id="reads"),
        pytest.param(Below, True, id="inherits"),
        pytest.param(nn.Linear, False, id="plain"),
    ],
)
def test_subclasses_that_use_their_own_weight(cls, reads):
    assert reads_own_weight(cls, nn.Linear) is reads


def qwen2_vl():
    vision = {"embed_dim": 16, "hidden_size": 16, "depth": 2, "num_heads": 2, "mlp_ratio": 2}
    text = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
            "num_attention_heads": 2, "num_key_value_heads": 2}  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(hf.Qwen2VLConfig(text_config=text, vision_config=vision))


def linear_reads(model):
    """Last two parts of the names of the linear layers whose weight is read, convolutions and tables left out."""
    linear = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    read = linear & set(directly_read(model))
    return {".".join(name.split(".")[-2:]) for name in read}


@pytest.mark.parametrize(
    ("build", "read"),
    [
        pytest.param(BY_ID["mamba"].build, {"mixer.dt_proj", "lm_head"}, id="mamba-dt"),
        pytest.param(lambda: nn.MultiheadAttention(8, 2), {"out_proj"}, id="attention-out"),
        pytest.param(
            lambda: nn.TransformerEncoderLayer(8, 2), {"self_attn.out_proj", "linear1", "linear2"}, id="torch-encoder"
        ),
        pytest.param(qwen2_vl, {"mlp.fc2"}, id="qwen2-vl-dtype"),
        pytest.param(BY_ID["siglip-vision"].build, {"attention.out_proj"}, id="siglip-pooling"),
    ],
)
def test_real_modules_that_read(build, read):
    assert linear_reads(build()) == read


CALLERS = ["llama", "qwen2", "phi3", "gpt2", "bloom", "opt", "mixtral", "gpt-oss", "bert-classifier"]
CALLERS += ["distilbert", "t5-relu", "t5-gated", "bart", "llava"]


@pytest.mark.parametrize("row_id", CALLERS)
def test_real_models_whose_linear_layers_are_only_called(row_id):
    assert linear_reads(BY_ID[row_id].build()) == set()
