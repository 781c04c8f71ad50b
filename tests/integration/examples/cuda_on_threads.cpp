// Runs matmul_kernel of examples/existing_extensions/cuda_setuptools on 256 threads of the CPU,
// where __syncthreads is a barrier. Built with the address sanitizer; every matrix is as large as
// its elements, so a read outside is found.
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <random>
#include <thread>
#include <vector>

namespace at {
template <typename T>
using opmath_type = T;
}
struct Index {
  unsigned x;
};
thread_local Index threadIdx, blockIdx;
std::barrier<> all_threads(256);

#define __global__
#define __device__
#define __syncthreads() all_threads.arrive_and_wait()

// The kernel.

struct Layout {
  const char* name;
  int64_t row_stride, column_stride;
};

template <typename T>
struct Matrix {
  Matrix(int64_t rows, int64_t columns, int layout) {
    const Layout layouts[] = {
        {"rows", columns, 1}, {"columns", 1, rows}, {"gaps", 3 * columns, 3}, {"repeated", 0, 1}};
    at = layouts[layout];
    data.resize((rows - 1) * at.row_stride + (columns - 1) * at.column_stride + 1);
    static std::mt19937 random;
    for (T& value : data) value = T(int(random() % 17) - 8);
  }
  T operator()(int64_t i, int64_t j) const {
    return data[i * at.row_stride + j * at.column_stride];
  }
  Layout at;
  std::vector<T> data;
};

// Small whole numbers: sums are exact in any order.
template <typename T, int kTile>
int multiply(int64_t m, int64_t k, int64_t n, int a_layout, int b_layout) {
  const Matrix<T> a(m, k, a_layout), b(k, n, b_layout);
  std::vector<T> c(m * n, T(-12345));
  const Lines<T> left{a.data.data(), m, a.at.row_stride, a.at.column_stride};
  const Lines<T> right{b.data.data(), n, b.at.column_stride, b.at.row_stride};
  const int64_t blocks = (m + kTile - 1) / kTile * ((n + kTile - 1) / kTile);
  std::vector<std::jthread> threads;
  for (unsigned thread = 0; thread < 256; ++thread) {
    threads.emplace_back([&, thread] {
      threadIdx.x = thread;
      for (unsigned block = 0; block < blocks; ++block) {
        blockIdx.x = block;
        matmul_kernel<T, kTile>(left, right, c.data(), k);
        all_threads.arrive_and_wait();  // the next block has the same shared memory
      }
    });
  }
  threads.clear();
  for (int64_t i = 0; i < m; ++i) {
    for (int64_t j = 0; j < n; ++j) {
      T wanted = 0;
      for (int64_t x = 0; x < k; ++x) wanted += a(i, x) * b(x, j);
      if (c[i * n + j] != wanted) {
        std::printf("%s x %s, m %ld k %ld n %ld, tile %d: [%ld, %ld] is %g, wanted %g\n", a.at.name,
                    b.at.name, long(m), long(k), long(n), kTile, long(i), long(j),
                    double(c[i * n + j]), double(wanted));
        return 0;
      }
    }
  }
  return 1;
}

int main() {
  const int64_t sizes[][3] = {{1, 1, 1}, {17, 33, 65}, {130, 16, 129}, {3, 50, 200}};
  int right = 0;
  for (const auto& [m, k, n] : sizes) {
    for (int layouts = 0; layouts < 16; ++layouts) {
      right += multiply<float, 64>(m, k, n, layouts / 4, layouts % 4);
      right += multiply<double, 128>(m, k, n, layouts / 4, layouts % 4);
    }
  }
  std::printf("%d products\n", right);
}
