// How the steps of an LSTM are taken on a GPU: in one launch that keeps the weights on the chip, or one by one.
#pragma once

#include <opwright/launch.cuh>

#include "gpu_grid.cuh"
#include "gpu_grid_back.cuh"

namespace opwright_ops::gpu {

// A launch that takes all steps: `parts` of the batch side by side, each in as many blocks as the units need, with
// `sets` of 8 units a block; of a part, `slices` of 8 `tiles` entries take turns. No blocks: there is none.
struct Plan {
  int blocks = 0, parts = 0, sets = 0, tiles = 0, slices = 0;
};

constexpr int kMostSlices = 4;

// The plan for B entries, H units and R of h, of which an element has this many bytes.
inline Plan plan_of(int64_t H, int64_t R, int64_t B, int bytes, int multiprocessors, int capability) {
  if (capability < 90 || bytes > 4 || R != H || B < 1 || H * bytes > 4096) return {};
  const auto up = [](int64_t a, int64_t b) { return static_cast<int>((a + b - 1) / b); };
  const int most = multiprocessors / 2 * 2;
  Plan plan;
  plan.sets = up(H, 8) <= most && H * bytes <= (bytes == 4 ? 4096 : 2048) ? 1 : 2;
  plan.blocks = up(up(H, 8 * plan.sets), 2) * 2;
  if (plan.blocks > most || (bytes == 4 && plan.sets > 1)) return {};
  const int tiles = up(B, 8);
  plan.parts = most / plan.blocks < tiles ? most / plan.blocks : tiles;
  const int each = up(tiles, plan.parts), widest = plan.sets > 1 || bytes == 4 ? 2 : 4;
  plan.tiles = each >= widest ? widest : each > 2 ? 4 : each;
  plan.slices = up(each, plan.tiles);
  plan.parts = up(tiles, plan.tiles * plan.slices);
  if (plan.slices > kMostSlices) return {};
  return plan;
}

// use<sets, tiles>() for all that plans have.
template <typename T, typename Use>
void for_tiles(const Use& use) {
  use.template operator()<1, 1>();
  use.template operator()<1, 2>();
  if constexpr (kIsNarrow<T>) {
    use.template operator()<1, 4>();
    use.template operator()<2, 1>();
    use.template operator()<2, 2>();
  }
}

template <typename Kernel>
struct Launch {
  Kernel kernel = nullptr;
  int64_t shared_bytes = 0;
};

// The kernel of a plan: the fast one of that width, if there is one, or that for all.
template <typename T>
auto forward_of(const Plan& plan, const Layer<T>& layer) {
  Launch<void (*)(GridSteps<T>)> launch;
  const auto use = [&]<bool kIsFast, int SETS, int NT, int PARTS, int MOST, int HELD>() {
    using Kind = Grid<T, kIsFast, SETS, NT, PARTS, MOST, HELD>;
    if (launch.kernel || plan.sets != SETS || plan.tiles != NT || (kIsFast && !Kind::is_for(layer))) return;
    launch = {take_in_grid<T, kIsFast, SETS, NT, PARTS, MOST, HELD>, Kind::shared_bytes(plan.slices, layer.R)};
  };
  const auto use_all = [&]<int SETS, int NT>() {
    if constexpr (!kIsNarrow<T>) {
      use.template operator()<true, SETS, NT, 8, 4, 8>();
      use.template operator()<true, SETS, NT, 8, 8, 16>();
      use.template operator()<false, SETS, NT, 8, 8, 16>();
    } else if constexpr (SETS == 1) {
      constexpr int kParts = NT == 1 ? 8 : 4, kTimes = 8 / kParts;
      use.template operator()<true, SETS, NT, kParts, 2 * kTimes, 4 * kTimes>();
      use.template operator()<true, SETS, NT, kParts, 3 * kTimes, 6 * kTimes>();
      use.template operator()<true, SETS, NT, kParts, 4 * kTimes, 8 * kTimes>();
      use.template operator()<false, SETS, NT, kParts, 4 * kTimes, 8 * kTimes>();
    } else {
      use.template operator()<true, SETS, NT, 8, 6, 8>();
      use.template operator()<true, SETS, NT, 8, 8, 8>();
      use.template operator()<false, SETS, NT, 8, 8, 8>();
    }
  };
  for_tiles<T>(use_all);
  return launch;
}

template <typename T>
auto backward_of(const Plan& plan, const Layer<T>& layer) {
  Launch<void (*)(GridSweep<T>)> launch;
  const auto use = [&]<bool kIsFast, int SETS, int NT, int MOST, int HELD>() {
    using Kind = GridBack<T, kIsFast, SETS, NT, MOST, HELD>;
    if (launch.kernel || plan.sets != SETS || plan.tiles != NT || (kIsFast && !Kind::is_for(layer))) return;
    launch = {sweep_in_grid<T, kIsFast, SETS, NT, MOST, HELD>, Kind::shared_bytes(plan.slices, layer.H)};
  };
  const auto use_all = [&]<int SETS, int NT>() {
    if constexpr (!kIsNarrow<T>) {
      use.template operator()<true, SETS, NT, 8, 16>();
      use.template operator()<true, SETS, NT, 16, 32>();
      use.template operator()<false, SETS, NT, 16, 32>();
    } else if constexpr (SETS == 1) {
      use.template operator()<true, SETS, NT, 4, 8>();
      use.template operator()<true, SETS, NT, 6, 12>();
      use.template operator()<true, SETS, NT, 8, 16>();
      use.template operator()<false, SETS, NT, 8, 16>();
    } else {
      use.template operator()<true, SETS, NT, 12, 16>();
      use.template operator()<true, SETS, NT, 16, 16>();
      use.template operator()<false, SETS, NT, 16, 16>();
    }
  };
  for_tiles<T>(use_all);
  return launch;
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
  int clusters = 0;
  const bool fits =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes)) ==
          cudaSuccess &&
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) == cudaSuccess &&
      clusters * cluster >= plan.blocks * plan.parts;
  config.numAttrs = 2;
  if (fits && cudaLaunchKernelEx(&config, kernel, arguments) == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

}  // namespace opwright_ops::gpu
