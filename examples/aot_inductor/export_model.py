"""Exports a model with operators of opwright_ops and compiles it for C++: model.pt2, and samples.pt to compare with."""

import opwright_ops
import torch
from torch import Tensor, nn


class Tagger(nn.Module):
    """Gives probabilities of 5 tags to each step of a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 64, bias=False)
        self.bias = nn.Parameter(torch.randn(64))
        self.lstm = opwright_ops.LSTM(64, 32, num_layers=2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(64, 5)

    def forward(self, input: Tensor) -> Tensor:
        hidden = opwright_ops.bias_gelu(self.linear(input), self.bias)
        output, _ = self.lstm(hidden)
        return opwright_ops.softmax(self.head(output))


def write_defaults(graph: torch.fx.Graph) -> None:
    """Writes the defaults of keywords into the calls: AOTInductor miscounts integers that are left out.

    That is pytorch#194261, which torch 2.13 has; `LSTM` calls operators with such integers.
    """
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "opwright_ops":
            keywords = [argument for argument in node.target._schema.arguments if argument.kwarg_only]
            node.kwargs = {argument.name: argument.default_value for argument in keywords} | node.kwargs


torch.manual_seed(0)
model = Tagger().eval()
with torch.no_grad():
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (torch.randn(2, 10, 16),), dynamic_shapes=({0: batch},))
    samples = [(input, model(input)) for input in (torch.randn(1, 10, 16), torch.randn(64, 10, 16))]
torch._inductor.aoti_compile_and_package(
    program, package_path="model.pt2", inductor_configs={"post_grad_custom_post_pass": write_defaults}
)
torch.save(samples, "samples.pt")
