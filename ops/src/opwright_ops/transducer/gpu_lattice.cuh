// The labels of rows, and the sum over alignments and its gradient: in float64 for
// every type of logits.
#pragma once

#include <opwright/launch.cuh>

#include "gpu_batch.cuh"

namespace opwright_ops {

static __global__ void __launch_bounds__(kRowThreads)
    columns_kernel(Batch batch, int64_t parts, View<const int64_t, 2> targets, int64_t classes,
                   int64_t star_index, int64_t* output) {
  opwright::let_next_start();
  const int64_t entry = blockIdx.x / parts, part = blockIdx.x % parts;
  const Rows rows = rows_of_entry(batch, entry, batch.rows);
  const int64_t count = batch.count(entry);
  for (int64_t i = part * kRowThreads + threadIdx.x; i < count; i += parts * kRowThreads) {
    const int64_t t = i / rows.width, u = i % rows.width;
    int64_t column = classes;
    if (!rows.has(t, u)) {
      column = classes + 1;
    } else if (u < rows.positions - 1) {
      const int64_t label = targets(entry, u);
      if (star_index < 0 || label != star_index)
        column = 0 <= label && label < classes ? label : classes + 2;
    }
    output[rows.first + i] = column;
  }
}

__device__ OPWRIGHT_INLINE double log_sum(double a, double b) {
  const double most = a > b ? a : b, least = a > b ? b : a;  // either if one is NaN
  if (least == kImpossible) return most;
  return most + log1p(exp(least - most));
}

// The most positions that a block of the lattice holds at a time, one in each thread; longer
// utterances take several strips of positions, one after the other.
constexpr int kMaxPositions = 256;
// Cells of a position that are loaded before they are needed. Even: see `exchanged`.
constexpr int kCellsAhead = 8;

// A block for each utterance: its threads stand side by side on a diagonal, each in its position,
// and go towards frame 0.
static __global__ void __launch_bounds__(kMaxPositions)
    lattice_kernel(Batch batch, Steps steps, double* loss, double* beta) {
  // What the threads found on the last diagonal and on this one, in turns.
  __shared__ double exchanged[2][kMaxPositions];
  opwright::let_next_start();
  const int64_t entry = blockIdx.x;
  const Rows rows = rows_of_entry(batch, entry, batch.rows);
  const int threads = blockDim.x, id = threadIdx.x;
  for (int64_t strip = (rows.positions - 1) / threads; strip >= 0; --strip) {
    const int64_t start = strip * threads, u = start + id;
    const int held = static_cast<int>(min(rows.positions - start, int64_t{threads}));
    const bool is_held = id < held, is_end = u == rows.positions - 1;
    const bool is_border = id == held - 1 && !is_end;
    const Position position = is_held ? steps.position(rows, entry, u) : Position{};
    struct Cell {
      double blank, label;
    };
    const auto load_cell = [&](int64_t t) {
      Cell cell{};
      if (t < 0 || t >= rows.frames || !is_held) return cell;
      cell.blank = steps.blank_score(rows.at(t, u));
      cell.label = steps.label_score(rows.at(t, u));
      return cell;
    };
    int64_t t = rows.frames - 1 + (held - 1 - id);  // on the first diagonal
    Cell cells[kCellsAhead];
    OPWRIGHT_UNROLL
    for (int k = 0; k < kCellsAhead; ++k) cells[k] = load_cell(t - k);
    double sum = is_end ? 0 : kImpossible;
    const int64_t diagonals = rows.frames + held - 1;
    for (int64_t first = 0; first < diagonals; first += kCellsAhead) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kCellsAhead; ++k, --t) {
        const Cell cell = cells[k];
        cells[k] = load_cell(t - kCellsAhead);
        if (is_held && 0 <= t && t < rows.frames) {
          sum += steps.blank(position, cell.blank);
          if (!is_end) {
            const double beside =
                is_border ? beta[rows.at(t, u + 1)] : exchanged[(k + 1) % 2][id + 1];
            sum = log_sum(sum, beside + steps.label(position, cell.label, rows, t));
          }
          exchanged[k % 2][id] = sum;
          beta[rows.at(t, u)] = sum;
        }
        __syncthreads();
      }
    }
    if (u == 0) loss[entry] = -sum;
  }
}

// Shares the gradient of the loss out among the steps of all alignments: each row gives what comes
// to it to its two steps, in the proportion of exp(step + sum ahead). Threads stand as in
// lattice_kernel, and go towards the last frame. A strip leaves what goes to the next one in
// `border`, for each frame; null where there is one strip.
static __global__ void __launch_bounds__(kMaxPositions)
    lattice_backward_kernel(Batch batch, Steps steps, View<const double, 1> grad_loss,
                            View<const double, 1> beta, double* border, double* of_blank,
                            double* of_label) {
  __shared__ double exchanged[2][kMaxPositions];  // as in lattice_kernel
  opwright::let_next_start();
  const int64_t entry = blockIdx.x;
  const Rows rows = rows_of_entry(batch, entry, batch.rows);
  const int threads = blockDim.x, id = threadIdx.x;
  for (int64_t start = 0; start < rows.positions; start += threads) {
    const int64_t u = start + id;
    const int held = static_cast<int>(min(rows.positions - start, int64_t{threads}));
    const bool is_held = id < held, is_end = u == rows.positions - 1;
    const Position position = is_held ? steps.position(rows, entry, u) : Position{};
    struct Cell {
      double blank, label, ahead, up;  // scores, and sums ahead
    };
    const auto load_cell = [&](int64_t t) {
      Cell cell{};
      if (t < 0 || t >= rows.frames || !is_held) return cell;
      cell.blank = steps.blank_score(rows.at(t, u));
      cell.label = steps.label_score(rows.at(t, u));
      cell.ahead = is_end ? 0 : kImpossible;
      if (t < rows.frames - 1) cell.ahead = beta(rows.at(t + 1, u));
      cell.up = is_end ? kImpossible : beta(rows.at(t, u + 1));
      return cell;
    };
    int64_t t = -id;  // on the first diagonal
    Cell cells[kCellsAhead];
    OPWRIGHT_UNROLL
    for (int k = 0; k < kCellsAhead; ++k) cells[k] = load_cell(t + k);
    double by_blank = 0;
    const int64_t diagonals = rows.frames + held - 1;
    for (int64_t first = 0; first < diagonals; first += kCellsAhead) {
      OPWRIGHT_UNROLL
      for (int k = 0; k < kCellsAhead; ++k, ++t) {
        const Cell cell = cells[k];
        cells[k] = load_cell(t + kCellsAhead);
        if (is_held && 0 <= t && t < rows.frames) {
          const double ahead = cell.ahead + steps.blank(position, cell.blank);
          const double up = cell.up + steps.label(position, cell.label, rows, t);
          const double less = exp(-fabs(ahead - up)), more = 1 / (1 + less);
          double comes = t == 0 && u == 0 ? -grad_loss(entry) : by_blank;
          if (id > 0)
            comes += exchanged[(k + 1) % 2][id - 1];
          else if (u > 0)
            comes += border[rows.first + t];
          by_blank = ahead == kImpossible ? 0 : comes * (ahead > up ? more : less * more);
          double by_label = up == kImpossible ? 0 : comes * (ahead > up ? less * more : more);
          exchanged[k % 2][id] = by_label;
          if (id == held - 1 && !is_end) border[rows.first + t] = by_label;
          of_blank[rows.at(t, u)] = position.is_behind_star ? 0 : by_blank;
          of_label[rows.at(t, u)] = position.is_star ? 0 : by_label;
        }
        __syncthreads();
      }
    }
  }
}

// Threads of a block of the lattice, for up to `labels` labels.
inline dim3 lattice_block(int64_t labels) {
  const int64_t threads = (labels / kWarp + 1) * kWarp;
  return dim3(static_cast<unsigned>(threads < kMaxPositions ? threads : kMaxPositions));
}

// Sets a padded result to zero: the kernels write only the rows within the lengths.
inline void clear_unused(const View<double, 1>& result, int64_t frames, cudaStream_t stream) {
  if (frames) cudaMemsetAsync(result.data(), 0, result.numel() * sizeof(double), stream);
}

}  // namespace opwright_ops
