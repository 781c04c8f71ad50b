// How the steps of an LSTM are taken on a GPU: in one launch that keeps the weights on the chip, or one by one.
#pragma once

#include <opwright/launch.cuh>

#include "gpu_grid.cuh"
#include "gpu_grid_back.cuh"

namespace opwright_ops::gpu {

// A launch that takes all steps: `parts` of the batch side by side, each in as many blocks as the units need; of a part,
// `slices` of 8 `tiles` entries take turns. No blocks: there is none.
struct Plan {
  int blocks = 0, parts = 0, tiles = 0, slices = 0;
};

// Sets of units of a block: what its registers and shared memory hold at the greatest width.
template <typename T>
constexpr int kSets = kIsNarrow<T> ? 2 : 1;

// The plan for B entries, H units and R of h.
template <typename T>
Plan plan_of(int64_t H, int64_t R, int64_t B, opwright::Device device) {
  constexpr int64_t kMostBytes = 4096, kMostTiles = 2, kMostSlices = 4;  // of h of an entry
  if (device.capability < 90 || sizeof(T) > 4 || R != H || B < 1 || H * int64_t{sizeof(T)} > kMostBytes) return {};
  const auto up = [](int64_t a, int64_t b) { return (a + b - 1) / b; };
  const int64_t blocks = up(H, 2 * kSets<T> * kUnits) * 2, fit = device.multiprocessors / blocks, eights = up(B, 8);
  if (fit < 1) return {};
  const int64_t each = up(eights, fit), tiles = each < kMostTiles ? each : kMostTiles, slices = up(each, tiles);
  if (slices > kMostSlices) return {};
  return {static_cast<int>(blocks), static_cast<int>(up(eights, tiles * slices)), static_cast<int>(tiles),
          static_cast<int>(slices)};
}

template <typename Kernel>
struct Launch {
  Kernel kernel = nullptr;
  int64_t shared_bytes = 0;
};

// use<is fast, tiles, most groups of a warp, steps in registers>() for all kernels, the fast ones first, and those
// with less columns. In the backward a warp has twice as many groups.
template <typename T, int NT, int TIMES, typename Use>
void for_kernels(const Use& use) {
  if constexpr (kIsNarrow<T>) {
    use.template operator()<true, NT, 2 * TIMES, 4 * TIMES>();
    use.template operator()<true, NT, 3 * TIMES, 6 * TIMES>();
    use.template operator()<true, NT, 4 * TIMES, 8 * TIMES>();
    use.template operator()<true, NT, 6 * TIMES, 8 * TIMES>();
    use.template operator()<true, NT, 8 * TIMES, 8 * TIMES>();
    use.template operator()<false, NT, 8 * TIMES, 8 * TIMES>();
  } else {
    use.template operator()<true, NT, 4 * TIMES, 8 * TIMES>();
    use.template operator()<true, NT, 8 * TIMES, 16 * TIMES>();
    use.template operator()<false, NT, 8 * TIMES, 16 * TIMES>();
  }
}

// The kernel of a plan: the fast one of that width, if there is one, or that for all.
template <typename T>
auto forward_of(const Plan& plan, const Layer<T>& layer) {
  Launch<void (*)(GridSteps<T>)> launch;
  const auto use = [&]<bool kIsFast, int NT, int MOST, int HELD>() {
    using Kind = Grid<T, kIsFast, kSets<T>, NT, MOST, HELD>;
    if (launch.kernel || plan.tiles != NT || (kIsFast && !Kind::is_for(layer))) return;
    launch = {take_in_grid<T, kIsFast, kSets<T>, NT, MOST, HELD>, Kind::shared_bytes(plan.slices, layer.R)};
  };
  for_kernels<T, 1, 1>(use);
  for_kernels<T, 2, 1>(use);
  return launch;
}
template <typename T>
auto backward_of(const Plan& plan, const Layer<T>& layer) {
  Launch<void (*)(GridSweep<T>)> launch;
  const auto use = [&]<bool kIsFast, int NT, int MOST, int HELD>() {
    using Kind = GridBack<T, kIsFast, kSets<T>, NT, MOST, HELD>;
    if (launch.kernel || plan.tiles != NT || (kIsFast && !Kind::is_for(layer))) return;
    launch = {sweep_in_grid<T, kIsFast, kSets<T>, NT, MOST, HELD>, Kind::shared_bytes(plan.slices, layer.H)};
  };
  for_kernels<T, 1, 2>(use);
  for_kernels<T, 2, 2>(use);
  return launch;
}

// How many clusters of such a launch the GPU holds at once; asked for once, as far as remembered.
template <typename Arguments>
int clusters_at_once(void (*kernel)(Arguments), const cudaLaunchConfig_t& config) {
  struct Known {
    void (*kernel)(Arguments);
    int device;
    size_t shared_bytes;
    int clusters;
  };
  constexpr int kMost = 8;
  static thread_local Known known[kMost] = {};
  static thread_local int next = 0;
  int device = 0, clusters = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  for (const auto& one : known)
    if (one.kernel == kernel && one.device == device && one.shared_bytes == config.dynamicSmemBytes) return one.clusters;
  if (cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                           static_cast<int>(config.dynamicSmemBytes)) != cudaSuccess ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  known[next] = {kernel, device, config.dynamicSmemBytes, clusters};
  next = (next + 1) % kMost;
  return clusters;
}

// Runs a kernel all of whose blocks are on the GPU at once; false, and nothing is run, where they are not certain to be.
template <typename Arguments>
bool run_at_once(void (*kernel)(Arguments), const Arguments& arguments, const Plan& plan, int64_t shared_bytes,
                 int cluster, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.parts));
  config.blockDim = dim3(kThreads);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  const bool fits = clusters_at_once(kernel, config) * cluster >= plan.blocks * plan.parts;
  config.numAttrs = 2;
  if (fits && cudaLaunchKernelEx(&config, kernel, arguments) == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

}  // namespace opwright_ops::gpu
