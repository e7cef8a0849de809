#pragma once

#include <ATen/core/Tensor.h>

namespace tesserae::experts {

/// y = x W_g^T with a matrix for each group of rows: the first counts[0] rows of x [rows, in] are multiplied by
/// weight[0], the next counts[1] by weight[1], and so on; weight [groups, out, in], y [rows, out]. `counts` [groups]:
/// int64, on the host.
///
/// Differentiable once, deterministic. Groups without rows are as good as any other: their gradient is zero, and a call
/// without any rows has the same graph as others. The gradient of the weights is computed where it will be reduced
/// (autograd::gradient_destination), if that place is to be had. Throws InvalidArgument for shapes that do not go
/// together.
at::Tensor grouped_linear(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& counts);

}  // namespace tesserae::experts
