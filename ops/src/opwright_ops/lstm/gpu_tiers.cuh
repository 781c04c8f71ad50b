// How the steps of an LSTM are taken on a GPU: in one launch that keeps the weights on the chip, or
// one by one.
#pragma once

#include <opwright/launch.cuh>

#include "gpu_grid.cuh"
#include "gpu_grid_back.cuh"
#include "gpu_single.cuh"

namespace opwright_ops::gpu {

// A launch that takes all steps: `parts` of the batch side by side, each in as many blocks as the
// units need; of a part, `slices` of 8 `tiles` entries take turns. Near and exact: as of a kernel.
// Single: each entry has a block of its own. Half: a block has half a set of units more than
// others. No blocks: there is none.
struct Plan {
  bool is_near = false;
  int blocks = 0, parts = 0, tiles = 0, slices = 0;
  bool is_exact = false, is_single = false, has_half = false;
};

// Sets of units of a block: what its registers and shared memory hold at the greatest width.
template <typename T>
constexpr int kSets = kIsNarrow<T> ? 2 : 1;
constexpr int kNearSets = 4, kNearExactSets = 2;

inline int64_t up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Whether there are kernels at all.
template <typename T>
bool has_plans(int64_t B, opwright::Device device) {
  return device.capability >= 90 && sizeof(T) <= 4 && B >= 1;
}

// The plans for H units and B entries.
template <typename T>
Plan single_plan(int64_t H, int64_t B, opwright::Device device) {
  constexpr int64_t kMostUnits = 64, kMostEntries = 4;  // of a multiprocessor
  if (!has_plans<T>(B, device) || H > kMostUnits || B > kMostEntries * device.multiprocessors)
    return {};
  return {.blocks = 1, .parts = static_cast<int>(B), .tiles = 1, .slices = 1, .is_single = true};
}
template <typename T>
Plan near_plan(int64_t H, int64_t B, opwright::Device device, bool is_exact) {
  constexpr int64_t kMostBytes = 1024, kMostSlices = 4;  // of h of an entry
  if (!has_plans<T>(B, device) || H < 1 || H * int64_t{sizeof(T)} > kMostBytes) return {};
  const int64_t blocks = up(H, (is_exact ? kNearExactSets : kNearSets) * kUnits), eights = up(B, 8);
  const int64_t fit = opwright::clusters_within(device, blocks);
  if (fit < 1) return {};
  const int64_t each = up(eights, fit), slices = each < kMostSlices ? each : kMostSlices;
  return {true, static_cast<int>(blocks), static_cast<int>(up(eights, slices)),
          1,    static_cast<int>(slices), is_exact};
}
template <typename T>
Plan far_plan(int64_t H, int64_t B, opwright::Device device, bool is_exact) {
  constexpr int64_t kMostBytes = 4096, kMostBytesTf32 = 6144, kMostTiles = 2, kMostSlices = 4;
  const int64_t bytes = H * int64_t{sizeof(T)};
  const bool has_half = !kIsNarrow<T> && !is_exact && bytes > kMostBytes;
  if (!has_plans<T>(B, device) || H < 1 || bytes > (has_half ? kMostBytesTf32 : kMostBytes))
    return {};
  const int64_t units = kSets<T> * kUnits + (has_half ? kUnits / 2 : 0);
  const int64_t blocks = up(H, 2 * units) * 2, fit = device.multiprocessors / blocks,
                eights = up(B, 8);
  if (fit < 1) return {};
  const int64_t each = up(eights, fit), tiles = each < kMostTiles && !has_half ? each : kMostTiles,
                slices = up(each, tiles);
  if (slices > kMostSlices) return {};
  return {.blocks = static_cast<int>(blocks),
          .parts = static_cast<int>(up(eights, tiles * slices)),
          .tiles = static_cast<int>(tiles),
          .slices = static_cast<int>(slices),
          .is_exact = is_exact,
          .has_half = has_half};
}

template <typename Kernel>
struct Launch {
  Kernel kernel = nullptr;
  int64_t shared_bytes = 0;
  int threads = 0;
};

// use<kind, sets, tiles, most groups of a warp, steps in registers>() for all kernels, the fast
// ones first, and those with less columns. For the same registers, a warp of the backward has MORE
// times as many groups.
template <typename T, int MORE, int MORE_NEAR, typename Use>
void for_kernels(const Use& use) {
  const auto far = [&]<int NT>() {
    if constexpr (kIsNarrow<T>) {
      use.template operator()<kFast, kSets<T>, NT, 2 * MORE, 4 * MORE>();
      use.template operator()<kFast, kSets<T>, NT, 3 * MORE, 6 * MORE>();
      use.template operator()<kFast, kSets<T>, NT, 4 * MORE, 8 * MORE>();
      use.template operator()<kFast, kSets<T>, NT, 6 * MORE, 8 * MORE>();
      use.template operator()<kFast, kSets<T>, NT, 8 * MORE, 8 * MORE>();
      use.template operator()<0, kSets<T>, NT, 8 * MORE, 8 * MORE>();
      if constexpr (NT == 2) {
        // Two teams share the register file, so fewer steps of the weights are held: more would
        // spill.
        constexpr int kTeams = kFast | kTwoTeams;
        use.template operator()<kTeams, kSets<T>, NT, MORE, 2 * MORE>();
        use.template operator()<kTeams, kSets<T>, NT, 2 * MORE, 2 * MORE>();
        use.template operator()<kTeams, kSets<T>, NT, 3 * MORE, 2 * MORE>();
        use.template operator()<kTeams, kSets<T>, NT, 4 * MORE, 3 * MORE - 2>();
      }
    } else {
      use.template operator()<kFast, kSets<T>, NT, 4 * MORE, 8 * MORE>();
      use.template operator()<kFast, kSets<T>, NT, 8 * MORE, 16 * MORE>();
      use.template operator()<0, kSets<T>, NT, 8 * MORE, 16 * MORE>();
      constexpr int kHeld = 16 / NT * MORE;  // their sums take registers too
      use.template operator()<kExact | kFast, kSets<T>, NT, 4 * MORE, 8 * MORE>();
      use.template operator()<kExact | kFast, kSets<T>, NT, 8 * MORE, kHeld>();
      use.template operator()<kExact, kSets<T>, NT, 8 * MORE, kHeld>();
      if constexpr (NT == 2) {
        use.template operator()<kExact | kFast | kTwoTeams, kSets<T>, NT, MORE, 2 * MORE>();
        use.template operator()<kHalfMore | kFast, kSets<T>, NT, 12 * MORE, 12>();
        use.template operator()<kHalfMore, kSets<T>, NT, 12 * MORE, 12>();
      }
    }
  };
  use.template operator()<kNear | kFast, kNearSets, 1, MORE_NEAR, 2 * MORE_NEAR>();
  use.template operator()<kNear | kFast, kNearSets, 1, 2 * MORE_NEAR, 4 * MORE_NEAR>();
  use.template operator()<kNear, kNearSets, 1, 2 * MORE_NEAR, 4 * MORE_NEAR>();
  use.template operator()<kNear | kNormalised, kNearSets, 1, 2 * MORE_NEAR, 4 * MORE_NEAR>();
  if constexpr (kIsNarrow<T>) {
    constexpr int kTeams = kNear | kFast | kTwoTeams;
    use.template operator()<kTeams, kNearSets, 1, MORE_NEAR, 2 * MORE_NEAR>();
  } else {
    use.template operator()<kExact | kNear | kFast, kNearExactSets, 1, MORE_NEAR, 2 * MORE_NEAR>();
    constexpr int kExactTeams = kExact | kNear | kFast | kTwoTeams;
    use.template operator()<kExactTeams, kNearExactSets, 1, MORE_NEAR, 2 * MORE_NEAR>();
    use.template
    operator()<kExact | kNear | kFast, kNearExactSets, 1, 2 * MORE_NEAR, 4 * MORE_NEAR>();
    use.template operator()<kExact | kNear, kNearExactSets, 1, 2 * MORE_NEAR, 4 * MORE_NEAR>();
  }
  far.template operator()<1>();
  far.template operator()<2>();
}

// The kernel of a plan with so many teams: the fast one of that width, if there is one, or that for
// all.
template <typename T>
auto forward_of(const Plan& plan, const Layer<T>& layer, int teams) {
  Launch<void (*)(GridSteps<T>)> launch;
  for_kernels<T, 1, 1>([&]<int KIND, int SETS, int NT, int MOST, int HELD>() {
    using Steps = Grid<T, KIND, SETS, NT, MOST, HELD>;
    if (launch.kernel || plan.is_near != Steps::kIsNear || plan.is_exact != Steps::kIsExact ||
        plan.has_half != Steps::kHasHalf || plan.tiles != NT || teams != Steps::kTeams ||
        (Steps::kIsFast && !Steps::is_for(layer)) || Steps::kIsNormalised != layer.norm_c.defined())
      return;
    launch = {take_in_grid<T, KIND, SETS, NT, MOST, HELD>,
              Steps::shared_bytes(plan.slices, layer.R), Steps::kTeams * kThreads};
  });
  return launch;
}
template <typename T>
auto backward_of(const Plan& plan, const Layer<T>& layer, int teams) {
  Launch<void (*)(GridSweep<T>)> launch;
  for_kernels<T, 2, 4>([&]<int KIND, int SETS, int NT, int MOST, int HELD>() {
    using Steps = GridBack<T, KIND, SETS, NT, MOST, HELD>;
    if (launch.kernel || plan.is_near != Steps::kIsNear || plan.is_exact != Steps::kIsExact ||
        plan.has_half != Steps::kHasHalf || plan.tiles != NT || teams != Steps::kTeams ||
        (Steps::kIsFast && !Steps::is_for(layer)) || Steps::kIsNormalised != layer.norm_c.defined())
      return;
    launch = {sweep_in_grid<T, KIND, SETS, NT, MOST, HELD>,
              Steps::shared_bytes(plan.slices, layer.H), Steps::kTeams * kThreads};
  });
  return launch;
}

// run<is fast, width>() for the first kernel of single entries that is for a layer.
template <typename T, typename Run>
void run_single(const Layer<T>& layer, const Run& run) {
  if (Single<T, true, 32>::is_for(layer))
    run.template operator()<true, 32>();
  else if (Single<T, true, 64>::is_for(layer))
    run.template operator()<true, 64>();
  else
    run.template operator()<false, 64>();
}
template <typename T>
void take_single(const GridSteps<T>& steps, cudaStream_t stream) {
  run_single(steps.layer, [&]<bool kIsFast, int WIDTH>() {
    constexpr int kAll = Single<T, kIsFast, WIDTH>::kForward;
    take_alone<T, kIsFast, WIDTH><<<static_cast<unsigned>(steps.layer.B), kAll, 0, stream>>>(steps);
  });
}
template <typename T>
void sweep_single(const GridSweep<T>& sweep, cudaStream_t stream) {
  run_single(sweep.layer, [&]<bool kIsFast, int WIDTH>() {
    constexpr int kAll = Single<T, kIsFast, WIDTH>::kBackward;
    sweep_alone<T, kIsFast, WIDTH>
        <<<static_cast<unsigned>(sweep.layer.B), kAll, 0, stream>>>(sweep);
  });
}

// How many clusters of such a launch the GPU holds at once; asked for once, as far as remembered.
template <typename Arguments>
int clusters_at_once(void (*kernel)(Arguments), const cudaLaunchConfig_t& config) {
  struct Known {
    void (*kernel)(Arguments);
    int device;
    size_t shared_bytes;
    unsigned cluster;
    int clusters;
  };
  constexpr int kMost = 8;
  static thread_local Known known[kMost] = {};
  static thread_local int next = 0;
  int device = 0, clusters = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return 0;
  for (const auto& one : known)
    if (one.kernel == kernel && one.device == device &&
        one.shared_bytes == config.dynamicSmemBytes &&
        one.cluster == config.attrs[0].val.clusterDim.x)
      return one.clusters;
  if (config.attrs[0].val.clusterDim.x > 8 &&
      cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) !=
          cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  // All that a block may have, not what this launch needs: another launch of the kernel may need
  // more.
  int most = 0;
  cudaFuncAttributes found = {};
  if (cudaDeviceGetAttribute(&most, cudaDevAttrMaxSharedMemoryPerBlockOptin, device) !=
          cudaSuccess ||
      config.dynamicSmemBytes > static_cast<size_t>(most) ||
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most) !=
          cudaSuccess ||
      // Compiled for less than the GPU has, the kernel is empty.
      cudaFuncGetAttributes(&found, kernel) != cudaSuccess || found.ptxVersion < 90 ||
      cudaOccupancyMaxActiveClusters(&clusters, kernel, &config) != cudaSuccess) {
    (void)cudaGetLastError();
    return 0;
  }
  known[next] = {kernel, device, config.dynamicSmemBytes, config.attrs[0].val.clusterDim.x,
                 clusters};
  next = (next + 1) % kMost;
  return clusters;
}

// Runs a kernel whose blocks wait for each other, so they must all be on the GPU at once: those of
// a cluster always are. Returns false without a launch where that is not certain.
template <typename Arguments>
bool run_at_once(const Launch<void (*)(Arguments)>& launch, const Arguments& arguments,
                 const Plan& plan, int cluster, cudaStream_t stream) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  attributes[1].id = cudaLaunchAttributeCooperative;
  attributes[1].val.cooperative = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(plan.blocks), static_cast<unsigned>(plan.parts));
  config.blockDim = dim3(static_cast<unsigned>(launch.threads));
  config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = 1;
  const int needed = plan.is_near ? 1 : plan.blocks * plan.parts / cluster;
  const bool fits = clusters_at_once(launch.kernel, config) >= needed;
  config.numAttrs = plan.is_near ? 1 : 2;
  if (!fits) return false;
  // What failed before is not taken for a refusal.
  opwright::check(cudaPeekAtLastError() == cudaSuccess, "a kernel could not be launched");
  if (cudaLaunchKernelEx(&config, launch.kernel, arguments) == cudaSuccess) return true;
  (void)cudaGetLastError();
  return false;
}

// Runs launch_of(teams): with two teams if there are several slices, a kernel for two teams exists
// and both fit; otherwise with one.
template <typename Arguments, typename LaunchOf>
bool run_in_teams(const LaunchOf& launch_of, const Arguments& arguments, const Plan& plan,
                  int cluster, cudaStream_t stream) {
  for (int teams = plan.slices > 1 ? 2 : 1; teams; --teams) {
    const auto launch = launch_of(teams);
    if (launch.kernel && run_at_once(launch, arguments, plan, cluster, stream)) return true;
  }
  return false;
}

}  // namespace opwright_ops::gpu
