// How rows.cuh shares elements among the threads of a grid, with the threads taken one by one on a
// CPU. For random sizes, packs and shapes of grids, with few chunks along gridDim.y, each element
// belongs to one thread.
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#define __device__
#define __host__
struct dim3 {
  unsigned x = 1, y = 1, z = 1;
  dim3() = default;
  dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct uint4 {
  unsigned x, y, z, w;
};
unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift);
dim3 threadIdx, blockIdx, blockDim, gridDim;

#include "opwright/rows.cuh"

using opwright::Lot;
using opwright::Rows;
using opwright::Shape;
using opwright::Tiling;

struct Found {
  int64_t cases = 0, layered = 0,
          beyond = 0;  // layered: gridDim.z is not 1; beyond: blocks without panels
};

// False if an element has no thread, or more than one.
template <int N>
bool covers(const Rows& rows, const Tiling& tiling, int64_t elements, Found& found) {
  std::vector<uint8_t> count(elements);
  bool is_inside = true;
  const auto take = [&](int64_t at) {
    if (at < 0 || at >= elements)
      is_inside = false;
    else
      ++count[at];
  };
  gridDim = tiling.grid, blockDim = tiling.block;
  for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
    for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y) {
      found.beyond += int64_t{opwright::chunk_of_block()} * tiling.depth >= rows.panels;
      for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
        for (threadIdx.y = 0; threadIdx.y < blockDim.y; ++threadIdx.y)
          for (threadIdx.x = 0; threadIdx.x < blockDim.x; ++threadIdx.x) {
            const Lot<N> lot(rows, tiling.depth);
            for (int64_t panel = lot.first; panel < lot.end; panel += lot.step)
              for (int i = 0; i < N; ++i) take(panel * rows.width + lot.column + i);
            for (int i = 0; i < lot.partial; ++i) take(lot.end * rows.width + lot.column + i);
          }
    }
  ++found.cases, found.layered += tiling.grid.z > 1;
  for (const uint8_t c : count) is_inside = is_inside && c == 1;
  return is_inside && opwright::chunks_of(tiling) * tiling.depth >= rows.panels;
}

int main() {
  std::mt19937 random(0);
  const auto up_to = [&](int most) { return 1 + static_cast<int>(random() % most); };
  Found found;
  for (int i = 0; i < 4000; ++i) {
    const bool is_packed = random() % 2, is_flat = random() % 3 == 0;
    const int64_t width = random() % 2 ? up_to(40) : up_to(3000), most = 60000 / width;
    const int64_t n = random() % 100 ? width : 0;
    const int64_t count = random() % 100 ? up_to(static_cast<int>(most < 1 ? 1 : most)) : 0;
    // Rows that are not whole packs of 8 are cut 8 at a time.
    const int pack = is_packed ? 8 : 1, step = is_packed && n % 8 ? 8 : 1;
    const Rows rows =
        is_flat ? opwright::cut_flat(count * n, pack) : opwright::cut_rows(count, n, pack, step);
    const Shape shape{.pack = pack,
                      .deep = up_to(4),
                      .across = 32 << random() % 4,
                      .blocks = random() % 2 ? up_to(200) : 0,
                      .max_chunks = random() % 4 ? up_to(9) : 65535};
    const Tiling tiling = opwright::tile(rows, shape);
    const bool is_right = is_packed ? covers<8>(rows, tiling, count * n, found)
                                    : covers<1>(rows, tiling, count * n, found);
    if (!is_right || tiling.grid.y > shape.max_chunks) {
      std::printf(
          "wrong: %lld x %lld, pack %d, flat %d, deep %d, across %d, blocks %lld, max_chunks "
          "%lld\n",
          static_cast<long long>(count), static_cast<long long>(n), pack, is_flat, shape.deep,
          shape.across, static_cast<long long>(shape.blocks),
          static_cast<long long>(shape.max_chunks));
      return 1;
    }
  }
  std::printf("%lld cases, %lld of several layers, %lld blocks beyond the tensor\n",
              static_cast<long long>(found.cases), static_cast<long long>(found.layered),
              static_cast<long long>(found.beyond));
  return found.layered && found.beyond ? 0 : 2;
}
