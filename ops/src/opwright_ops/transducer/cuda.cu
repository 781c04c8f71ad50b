// The scores of a transducer's rows, the sum over its alignments and its joint, on a GPU.
#include <opwright/kernel.h>
#include <opwright/scratch.h>
#include <opwright/tensor.h>

#include "../cross_entropy/gpu_rows.cuh"
#include "rows.h"

using namespace opwright_ops;
using opwright::with_adjacent_columns;

namespace {

constexpr double kImpossible = -__builtin_inf();
constexpr int kRowThreads = 256;

// The lengths of a batch; its rows are packed if `frames` is 0.
struct Batch {
  View<const int64_t, 1> logit_lengths, target_lengths;
  int64_t rows, labels, frames;

  __device__ OPWRIGHT_INLINE int64_t width(int64_t entry) const {
    return frames ? labels + 1 : target_lengths(entry) + 1;
  }
  __device__ OPWRIGHT_INLINE int64_t count(int64_t entry) const {
    return (frames ? frames : logit_lengths(entry)) * width(entry);
  }
};

// The rows of one utterance. All threads of the block must call it: they add up the rows of those
// in front. The block's lengths are checked here, as far as it reads them.
__device__ OPWRIGHT_INLINE Rows rows_of_entry(const Batch& batch, int64_t entry) {
  __shared__ int64_t parts[kWarp];
  const int id = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
  int64_t first = 0;
  if (batch.frames) {
    first = entry * batch.frames * (batch.labels + 1);
  } else {
    for (int64_t i = id; i < entry; i += threads) first += batch.count(i);
    first = opwright::warp_sum(first);
    if (id % kWarp == 0) parts[id / kWarp] = first;
    __syncthreads();
    first = 0;
    for (int i = 0; i < threads / kWarp; ++i) first += parts[i];
  }
  const int64_t frames = batch.logit_lengths(entry), labels = batch.target_lengths(entry);
  assert(1 <= frames && frames <= (batch.frames ? batch.frames : batch.rows) &&
         "`logit_lengths` must be at least 1, and at most the number of frames");
  assert(0 <= labels && labels <= batch.labels &&
         "`target_lengths` must be at least 0, and at most the number of columns of `targets`");
  assert((entry + 1 < batch.logit_lengths.size(0) ? first + batch.count(entry) <= batch.rows
                                                  : first + batch.count(entry) == batch.rows) &&
         "the number of rows is not that which the lengths make");
  return {first, batch.width(entry), frames, labels + 1};
}

__global__ void __launch_bounds__(kRowThreads)
    columns_kernel(Batch batch, int64_t parts, View<const int64_t, 2> targets, int64_t classes,
                   int64_t star_index, int64_t* output) {
  opwright::let_next_start();
  const int64_t entry = blockIdx.x / parts, part = blockIdx.x % parts;
  const Rows rows = rows_of_entry(batch, entry);
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

struct Scores {
  static constexpr bool kHasElements = false, kSkipsRows = true;
  int64_t v, blank;
  View<const int64_t, 1> labels;
  double *blank_score, *label_score, *normalizer;

  __device__ OPWRIGHT_INLINE bool is_used(int64_t row) const { return labels(row) != v + 1; }
  __device__ OPWRIGHT_INLINE void empty(int64_t row) const {
    blank_score[row] = label_score[row] = normalizer[row] = 0;
  }
  template <typename T>
  __device__ OPWRIGHT_INLINE void operator()(int64_t row, const T* from, double value,
                                             double) const {
    const int64_t label = labels(row);
    assert(0 <= label && label <= v && "a target is outside of the vocabulary");
    normalizer[row] = value;
    blank_score[row] = double(compute_t<T>(from[blank])) - value;
    label_score[row] = label < v ? double(compute_t<T>(from[label])) - value : 0;
  }
};

template <typename S>
struct ScoresGradient {
  static constexpr int kColumns = 2;
  static constexpr bool kSkipsRows = true;
  int64_t v, blank;
  View<const int64_t, 1> labels;
  View<const double, 1> of_blank, of_label, normalizer;

  __device__ OPWRIGHT_INLINE bool is_used(int64_t row) const { return labels(row) != v + 1; }
  __device__ OPWRIGHT_INLINE RowGradient<S> of(int64_t row) const {
    const int64_t label = labels(row);
    const double by_blank = of_blank(row), by_label = label < v ? of_label(row) : 0;
    return {.normalizer = normalizer(row),
            .grad = 1,
            .slope = S(-(by_blank + by_label)),
            .shift = 0,
            .at = {blank, label < v && label != blank ? label : -1},
            .minus = {S(-by_blank - (label == blank ? by_label : 0)), S(-by_label)},
            .is_zero = label == v + 1};
  }
};

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
__global__ void __launch_bounds__(kMaxPositions)
    lattice_kernel(Batch batch, Steps steps, double* loss, double* beta) {
  // What the threads found on the last diagonal and on this one, in turns.
  __shared__ double exchanged[2][kMaxPositions];
  opwright::let_next_start();
  const int64_t entry = blockIdx.x;
  const Rows rows = rows_of_entry(batch, entry);
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
__global__ void __launch_bounds__(kMaxPositions)
    lattice_backward_kernel(Batch batch, Steps steps, View<const double, 1> grad_loss,
                            View<const double, 1> beta, double* border, double* of_blank,
                            double* of_label) {
  __shared__ double exchanged[2][kMaxPositions];  // as in lattice_kernel
  opwright::let_next_start();
  const int64_t entry = blockIdx.x;
  const Rows rows = rows_of_entry(batch, entry);
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
dim3 lattice_block(int64_t labels) {
  const int64_t threads = (labels / kWarp + 1) * kWarp;
  return dim3(static_cast<unsigned>(threads < kMaxPositions ? threads : kMaxPositions));
}

// Zeroes the elements of a padded result, some of which no kernel writes.
void clear_unused(const View<double, 1>& result, int64_t frames, cudaStream_t stream) {
  if (frames) cudaMemsetAsync(result.data(), 0, result.numel() * sizeof(double), stream);
}

template <typename S>
__device__ OPWRIGHT_INLINE S activate(Activation activation, S x) {
  if (activation == Activation::relu) return opwright_ops::activate<Activation::relu>(x);
  if (activation == Activation::tanh) return opwright_ops::activate<Activation::tanh>(x);
  return x;
}
template <typename S>
__device__ OPWRIGHT_INLINE S pass_gradient(Activation activation, S grad, S x) {
  if (activation == Activation::relu) return opwright_ops::pass_gradient<Activation::relu>(grad, x);
  if (activation == Activation::tanh) return opwright_ops::pass_gradient<Activation::tanh>(grad, x);
  return grad;
}

// N: adjacent elements that a thread loads at once. A block computes all positions of one frame.
template <int N, typename T>
__global__ void __launch_bounds__(kRowThreads)
    join_kernel(Batch batch, int64_t frames, int64_t h, Vectors<T> f, Vectors<T> g,
                Activation activation, T* output) {
  using S = compute_t<T>;
  opwright::let_next_start();
  const int64_t entry = blockIdx.x / frames, t = blockIdx.x % frames;
  const Rows rows = rows_of_entry(batch, entry);
  if (!batch.frames && t >= rows.frames) return;
  for (int64_t j = threadIdx.x * N; j < h; j += blockDim.x * N) {
    S x[N];
    opwright::unpack(opwright::load_pack<N>(f.at(entry, t) + j), x);
#pragma unroll 4
    for (int64_t u = threadIdx.y; u < rows.width; u += blockDim.y) {
      S y[N];
      opwright::unpack(opwright::load_pack<N>(g.at(entry, u) + j), y);
      OPWRIGHT_UNROLL
      for (int k = 0; k < N; ++k) y[k] = rows.has(t, u) ? activate(activation, x[k] + y[k]) : S(0);
      opwright::store_pack(output + rows.at(t, u) * h + j, opwright::pack_of<T>(y));
    }
  }
}

constexpr int kHeldPositions = 2;  // of a thread of the joint's backward
constexpr int kFramesAtOnce = 4;   // whose gradients it loads together
constexpr int kMinFrames = 16;     // that a block adds up
constexpr int kJoinBlocks = 2;     // for each multiprocessor, where there is enough to do

// A block adds up the gradients of some columns of one utterance, over positions and over some
// frames: each is read once. kLanes threads lie across the columns, the others across positions.
// More positions than kHeldPositions for each of those take several passes, and sums of frames that
// go on in `partial_f`. The sums over the frames of each block go to `partial_g`, if it is not
// null.
template <int N, int kLanes, typename T>
__global__ void __launch_bounds__(kRowThreads)
    join_backward_kernel(Batch batch, int64_t frames, int64_t positions, int64_t h, Vectors<T> f,
                         Vectors<T> g, Activation activation, RowsOf<const T> grad,
                         int64_t frames_of_block, compute_t<T>* partial_f, compute_t<T>* partial_g,
                         T* grad_f, T* grad_g) {
  using S = compute_t<T>;
  constexpr int kGroups = kRowThreads / kLanes, kWarps = kRowThreads / kWarp;
  constexpr int kColumns = kLanes * N;
  __shared__ S sums[2][kFramesAtOnce][kWarps][kColumns];
  opwright::let_next_start();
  const int64_t parts = (h + kColumns - 1) / kColumns, entry = blockIdx.x / parts;
  const Rows rows = rows_of_entry(batch, entry);
  const int id = threadIdx.x, lane = id % kLanes, group = id / kLanes, warp = id / kWarp;
  const int64_t column = blockIdx.x % parts * kColumns, j = column + lane * N;
  const bool has_columns = j < h;
  const int64_t begin = blockIdx.y * frames_of_block, end = min(begin + frames_of_block, frames);
  int parity = 0;
  for (int64_t start = 0; start < positions; start += kGroups * kHeldPositions) {
    const bool is_last_pass = start + kGroups * kHeldPositions >= positions;
    S y[kHeldPositions][N], of_position[kHeldPositions][N] = {};
    OPWRIGHT_UNROLL
    for (int p = 0; p < kHeldPositions; ++p) {
      const int64_t u = start + group + p * kGroups;
      if (has_columns && u < rows.positions)
        opwright::unpack(opwright::load_pack<N>(g.at(entry, u) + j), y[p]);
    }
    for (int64_t first = begin; first < end; first += kFramesAtOnce, parity ^= 1) {
      Pack<T, N> loaded[kFramesAtOnce][kHeldPositions], frame[kFramesAtOnce];
      OPWRIGHT_UNROLL
      for (int k = 0; k < kFramesAtOnce; ++k) {
        const int64_t t = first + k;
        if (!has_columns || t >= rows.frames) continue;
        frame[k] = opwright::load_pack<N>(f.at(entry, t) + j);
        OPWRIGHT_UNROLL
        for (int p = 0; p < kHeldPositions; ++p) {
          const int64_t u = start + group + p * kGroups;
          if (u < rows.positions)
            loaded[k][p] = opwright::load_pack<N>(grad.row(rows.at(t, u)) + j);
        }
      }
      OPWRIGHT_UNROLL
      for (int k = 0; k < kFramesAtOnce; ++k) {
        S of_frame[N] = {};
        if (has_columns && first + k < rows.frames) {
          S x[N];
          opwright::unpack(frame[k], x);
          OPWRIGHT_UNROLL
          for (int p = 0; p < kHeldPositions; ++p) {
            if (start + group + p * kGroups >= rows.positions) continue;
            S of_row[N];
            opwright::unpack(loaded[k][p], of_row);
            OPWRIGHT_UNROLL
            for (int i = 0; i < N; ++i) {
              const S passed = pass_gradient(activation, of_row[i], x[i] + y[p][i]);
              of_frame[i] += passed;
              of_position[p][i] += passed;
            }
          }
        }
        OPWRIGHT_UNROLL
        for (int i = 0; i < N; ++i) {
          const S sum = opwright::warp_sum(of_frame[i], kLanes);
          if (id % kWarp < kLanes) sums[parity][k][warp][lane * N + i] = sum;
        }
      }
      __syncthreads();
      for (int i = id; i < kFramesAtOnce * kColumns; i += kRowThreads) {
        const int64_t t = first + i / kColumns,
                      at = (entry * frames + t) * h + column + i % kColumns;
        if (t >= end || column + i % kColumns >= h) continue;
        S sum = start ? partial_f[at] : S(0);
        for (int w = 0; w < kWarps; ++w) sum += sums[parity][i / kColumns][w][i % kColumns];
        if (is_last_pass)
          grad_f[at] = T(sum);
        else
          partial_f[at] = sum;
      }
    }
    OPWRIGHT_UNROLL
    for (int p = 0; p < kHeldPositions; ++p) {
      const int64_t u = start + group + p * kGroups;
      if (!has_columns || u >= positions) continue;
      const int64_t at = (entry * positions + u) * h + j;
      if (!partial_g) {
        opwright::store_pack(grad_g + at, opwright::pack_of<T>(of_position[p]));
        continue;
      }
      S* to = partial_g + blockIdx.y * (batch.logit_lengths.size(0) * positions * h) + at;
      OPWRIGHT_UNROLL
      for (int i = 0; i < N; ++i) to[i] = of_position[p][i];
    }
  }
}

template <typename T>
bool are_packs(const Vectors<T>& vectors) {
  constexpr int N = kPackWidth<T>;
  return opwright::is_aligned(vectors.data, N) && vectors.entry_stride % N == 0 &&
         vectors.step_stride % N == 0;
}

}  // namespace

void transducer_columns(View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t count, int64_t classes,
                        int64_t frames, int64_t star_index, View<int64_t, 1> output,
                        cudaStream_t stream) {
  const int64_t b = targets.size(0), parts = count / (b * 4 * kRowThreads) + 1;
  const Batch batch{logit_lengths, target_lengths, count, targets.size(1), frames};
  opwright::launch_behind(columns_kernel, dim3(static_cast<unsigned>(b * parts)), dim3(kRowThreads),
                          0, stream, batch, parts, targets, classes, star_index, output.data());
}

template <typename T>
void transducer_scores(View<const T, 2> logits, View<const int64_t, 1> labels, int64_t blank,
                       View<double, 1> blank_score, View<double, 1> label_score,
                       View<double, 1> normalizer, cudaStream_t stream) {
  const int64_t v = logits.size(1);
  launch_forward(with_adjacent_columns(logits),
                 Scores{.v = v,
                        .blank = opwright::check_index(blank, v),
                        .labels = labels,
                        .blank_score = blank_score.data(),
                        .label_score = label_score.data(),
                        .normalizer = normalizer.data()},
                 stream);
}

template <typename T>
void transducer_scores_backward(View<const double, 1> grad_blank_score,
                                View<const double, 1> grad_label_score, View<const T, 2> logits,
                                View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                int64_t blank, View<T, 2> grad_logits, cudaStream_t stream) {
  const int64_t v = logits.size(1);
  launch_backward(with_adjacent_columns(logits), grad_logits,
                  ScoresGradient<compute_t<T>>{.v = v,
                                               .blank = opwright::check_index(blank, v),
                                               .labels = labels,
                                               .of_blank = grad_blank_score,
                                               .of_label = grad_label_score,
                                               .normalizer = normalizer},
                  stream);
}

template <typename T>
void transducer_scores_gradient_(View<T, 2> logits, View<const double, 1> grad_blank_score,
                                 View<const double, 1> grad_label_score,
                                 View<const int64_t, 1> labels, View<const double, 1> normalizer,
                                 int64_t blank, cudaStream_t stream) {
  opwright::in_adjacent_columns(logits, [&](const View<const T, 2>& from, const View<T, 2>& to) {
    transducer_scores_backward<T>(grad_blank_score, grad_label_score, from, labels, normalizer,
                                  blank, to, stream);
  });
}

void transducer_lattice(View<const double, 1> blank_score, View<const double, 1> label_score,
                        View<const int64_t, 2> targets, View<const int64_t, 1> logit_lengths,
                        View<const int64_t, 1> target_lengths, int64_t frames, double delay_penalty,
                        double eos_penalty, int64_t eos_index, double star_penalty,
                        int64_t star_index, View<double, 1> loss, View<double, 1> beta,
                        cudaStream_t stream) {
  const int64_t b = targets.size(0), labels = targets.size(1);
  const Batch batch{logit_lengths, target_lengths, blank_score.size(0), labels, frames};
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  clear_unused(beta, frames, stream);
  opwright::launch_behind(lattice_kernel, dim3(static_cast<unsigned>(b)), lattice_block(labels), 0,
                          stream, batch, steps, loss.data(), beta.data());
}

void transducer_lattice_backward(View<const double, 1> grad_loss, View<const double, 1> blank_score,
                                 View<const double, 1> label_score, View<const int64_t, 2> targets,
                                 View<const int64_t, 1> logit_lengths,
                                 View<const int64_t, 1> target_lengths, View<const double, 1> beta,
                                 int64_t frames, double delay_penalty, double eos_penalty,
                                 int64_t eos_index, double star_penalty, int64_t star_index,
                                 View<double, 1> grad_blank_score, View<double, 1> grad_label_score,
                                 cudaStream_t stream) {
  const int64_t b = targets.size(0), labels = targets.size(1), rows = blank_score.size(0);
  const Batch batch{logit_lengths, target_lengths, rows, labels, frames};
  const Steps steps{blank_score, label_score,  targets,   delay_penalty,
                    eos_penalty, star_penalty, eos_index, star_index};
  double* border = labels < kMaxPositions ? nullptr : opwright::scratch<double>(rows);
  clear_unused(grad_blank_score, frames, stream);
  clear_unused(grad_label_score, frames, stream);
  opwright::launch_behind(lattice_backward_kernel, dim3(static_cast<unsigned>(b)),
                          lattice_block(labels), 0, stream, batch, steps, grad_loss, beta, border,
                          grad_blank_score.data(), grad_label_score.data());
}

template <typename T>
void transducer_join(View<const T, 3> f, View<const T, 3> g, View<const int64_t, 1> logit_lengths,
                     View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                     Activation activation, View<T, 2> output, cudaStream_t stream) {
  constexpr int N = kPackWidth<T>;
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  const Batch batch{logit_lengths, target_lengths, count, positions - 1, is_packed ? 0 : frames};
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  const bool has_packs = h % N == 0 && are_packs(from_f) && are_packs(from_g) &&
                         opwright::is_aligned(output.data(), N);
  const int64_t packs = has_packs ? h / N : h;
  int across = kWarp;
  while (across < kRowThreads && across < packs) across *= 2;
  opwright::launch_behind(has_packs ? join_kernel<N, T> : join_kernel<1, T>,
                          dim3(static_cast<unsigned>(b * frames)),
                          dim3(across, kRowThreads / across), 0, stream, batch, frames, h, from_f,
                          from_g, activation, output.data());
}

template <typename T>
void transducer_join_backward(View<const T, 2> grad_output, View<const T, 3> f, View<const T, 3> g,
                              View<const int64_t, 1> logit_lengths,
                              View<const int64_t, 1> target_lengths, int64_t count, bool is_packed,
                              Activation activation, View<T, 3> grad_f, View<T, 3> grad_g,
                              cudaStream_t stream) {
  constexpr int N = kPackWidth<T>;
  const int64_t b = f.size(0), frames = f.size(1), positions = g.size(1), h = f.size(2);
  const Batch batch{logit_lengths, target_lengths, count, positions - 1, is_packed ? 0 : frames};
  const Vectors<T> from_f = vectors_of(f), from_g = vectors_of(g);
  const RowsOf<const T> grad = rows_of(with_adjacent_columns(grad_output));
  const bool has_packs = h % N == 0 && are_packs(from_f) && are_packs(from_g) &&
                         are_aligned(grad) && opwright::is_aligned(grad_g.data(), N);
  const auto start = [&]<int kWidth, int kLanes>() {
    constexpr int kColumns = kWidth * kLanes;
    using S = compute_t<T>;
    const int64_t across = b * ((h + kColumns - 1) / kColumns);
    // Frames are split where there are too few columns for all multiprocessors.
    const int64_t wanted = kJoinBlocks * opwright::current_device().multiprocessors / across;
    const int64_t most = (frames + kMinFrames - 1) / kMinFrames;
    const int64_t parts = wanted < 1 ? 1 : wanted < most ? wanted : most;
    const int64_t frames_of_block =
        (frames + parts * kFramesAtOnce - 1) / (parts * kFramesAtOnce) * kFramesAtOnce;
    const int64_t splits = (frames + frames_of_block - 1) / frames_of_block;
    const bool is_one_pass = positions <= kRowThreads / kLanes * kHeldPositions;
    S* partial_f = is_one_pass ? nullptr : opwright::scratch<S>(b * frames * h);
    S* partial_g = splits == 1 ? nullptr : opwright::scratch<S>(splits * grad_g.numel());
    opwright::launch_behind(join_backward_kernel<kWidth, kLanes, T>,
                            dim3(static_cast<unsigned>(across), static_cast<unsigned>(splits)),
                            dim3(kRowThreads), 0, stream, batch, frames, positions, h, from_f,
                            from_g, activation, grad, frames_of_block, partial_f, partial_g,
                            grad_f.data(), grad_g.data());
    opwright::sum_partials(opwright::Partials<S>{partial_g, static_cast<int32_t>(splits), false},
                           grad_g.numel(), View<T, 1>{grad_g.data(), {grad_g.numel()}, {1}},
                           stream);
  };
  has_packs ? start.template operator()<N, 8>() : start.template operator()<1, 32>();
}

OPWRIGHT_KERNEL(transducer_columns)
OPWRIGHT_KERNEL(transducer_scores, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_backward, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_scores_gradient_, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_lattice)
OPWRIGHT_KERNEL(transducer_lattice_backward)
OPWRIGHT_KERNEL(transducer_join, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(transducer_join_backward, float, double, opwright::half, opwright::bfloat16)
