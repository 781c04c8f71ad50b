// GELU(input + bias) and its gradients on the CPU, each in one pass. The formulas are
// opwright/math.h's; NOTES.md has the derivations and the measurements behind the constants.
#include <opwright/kernel.h>
#include <opwright/math.h>

using opwright::compute_t;
using opwright::kLanes;
using opwright::Vec;
using opwright::View;

// Whether the tanh form spends five instructions of 29 to be right to 2 ulp where the result is
// tiny. In float it does not, and is EXACTTEXT.
template <typename T> constexpr bool kExactTail = sizeof(T) == 8;

// Columns that one piece of work covers. Bias and column sums of a block (16 KiB each in float) stay
// in the caches beside the rows that stream by. Narrower blocks cut the stream into pieces: blocks
// of 1024 columns took 13 % longer at (512, 4096) float32.
constexpr int64_t kBlock = 4096;
// Columns of a panel (see kNarrow), and of no more than one block in any type.
constexpr int64_t kPanelColumns = 1024;
// Rows shorter than this are laid end to end into panels of up to kPanelColumns, with the bias
// repeated: a row of 3 would leave most lanes of a vector idle and pay the loop's overhead.
constexpr int64_t kNarrow = 512;
// Panels whose bias gradient is summed column by column before the sums are paired up. It bounds
// the error of a sum to kPanels + log2(rows/kPanels) roundings, and does not depend on the number
// of threads, so neither does the result.
constexpr int64_t kPanels = 64;
// Bytes ahead of the loop that are fetched, of the outputs too. The loop is long enough to keep the
// hardware's prefetcher from running ahead: (512, 4096) float32 takes 13 % longer without.
constexpr int64_t kAheadBytes = 2048;

// How rows x n elements are cut: panels of `height` rows laid end to end, in blocks of `width`.
struct Grid {
  int64_t rows, n, height, panels, width, blocks;

  Grid(int64_t rows_, int64_t n_, int64_t block) : rows(rows_), n(n_) {
    height = n < kNarrow ? kPanelColumns / n : 1;
    panels = (rows + height - 1) / height;
    blocks = (n + block - 1) / block;
    // Blocks of equal width, a multiple of the longest vector.
    width = blocks == 1 ? height * n : ((n + blocks - 1) / blocks + 63) / 64 * 64;
    if (blocks > 1) blocks = (n + width - 1) / width;
  }

  // Rows in a panel and columns in the part of it that a block covers.
  int64_t rows_in(int64_t panel) const {
    const int64_t left = rows - panel * height;
    return left < height ? left : height;
  }
  int64_t columns_in(int64_t panel, int64_t block) const {
    if (height > 1) return rows_in(panel) * n;
    const int64_t left = n - block * width;
    return left < width ? left : width;
  }
};

// One block of one panel of a tensor as adjacent elements: its own memory, or a copy.
template <typename T>
class Reader {
 public:
  Reader(View<const T, 2> view, const Grid& grid)
      : view_(view), grid_(grid), row_(view.stride(0)), column_(grid.n == 1 ? 1 : view.stride(1)) {
    adjacent_ = column_ == 1 && (grid.height == 1 || row_ == grid.n);
  }

  const T* read(int64_t panel, int64_t block) {
    const T* from = view_.data() + panel * grid_.height * row_ + block * grid_.width * column_;
    if (adjacent_) return from;
    const int64_t count = grid_.columns_in(panel, block);
    // An expanded gradient has the same row everywhere.
    if (row_ == 0 && block == block_ && count <= count_) return buffer_;
    block_ = block;
    count_ = count;
    const int64_t n = count < grid_.n ? count : grid_.n;
    for (int64_t at = 0; at < count; at += n, from += row_) {
      for (int64_t i = 0; i < n; ++i) buffer_[at + i] = from[i * column_];
    }
    return buffer_;
  }

 private:
  View<const T, 2> view_;
  const Grid& grid_;
  int64_t row_, column_;
  bool adjacent_;
  int64_t block_ = -1, count_ = 0;
  T buffer_[kBlock];
};

// The bias of a block, widened and repeated for each row of a panel.
template <typename T>
class Bias {
 public:
  Bias(View<const T, 1> view, const Grid& grid) : view_(view), grid_(grid) {}

  const compute_t<T>* read(int64_t block) {
    if (block != block_) {
      block_ = block;
      const int64_t count = grid_.columns_in(0, block);
      const int64_t n = count < grid_.n ? count : grid_.n;
      const T* from = view_.data() + block * grid_.width * view_.stride(0);
      int64_t i = 0;
      if (view_.stride(0) == 1) {
        for (; i + kLanes<T> <= n; i += kLanes<T>) opwright::store(buffer_ + i, opwright::load(from + i));
      }
      for (; i < n; ++i) buffer_[i] = from[i * view_.stride(0)];
      for (int64_t i = n; i < count; ++i) buffer_[i] = buffer_[i - n];
    }
    return buffer_;
  }

 private:
  View<const T, 1> view_;
  const Grid& grid_;
  int64_t block_ = -1;
  compute_t<T> buffer_[kBlock] = {};
};

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) return opwright::gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh) return opwright::gelu_tanh<T, kExactTail<T>>(v);
  else return opwright::gelu_quick<T>(v);
}

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> d_gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) return opwright::d_gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh) return opwright::d_gelu_tanh<T>(v);
  else return opwright::d_gelu_quick<T>(v);
}

template <typename T>
OPWRIGHT_INLINE void fetch_ahead(const T* at) {
  __builtin_prefetch(reinterpret_cast<const char*>(at) + kAheadBytes);
}
template <typename T>
OPWRIGHT_INLINE void fetch_ahead_to_write(T* at) {
  __builtin_prefetch(reinterpret_cast<char*>(at) + kAheadBytes, 1);
}

// output = gelu(input + bias) for `count` adjacent elements, a multiple of kLanes<T>.
template <typename T, Approximate kApproximate>
void forward_row(const T* input, const compute_t<T>* bias, T* output, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    fetch_ahead(input + i);
    fetch_ahead_to_write(output + i);
    const auto v = opwright::load(input + i) + opwright::load(bias + i);
    opwright::store(output + i, gelu<T, kApproximate>(v));
  }
}

// grad_input = grad * gelu'(input + bias), added to `sums` too.
template <typename T, Approximate kApproximate>
void backward_row(const T* grad, const T* input, const compute_t<T>* bias, T* grad_input,
                  compute_t<T>* sums, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    fetch_ahead(grad + i);
    fetch_ahead(input + i);
    fetch_ahead_to_write(grad_input + i);
    const auto v = opwright::load(input + i) + opwright::load(bias + i);
    const auto d = opwright::load(grad + i) * d_gelu<T, kApproximate>(v);
    opwright::store(grad_input + i, d);
    opwright::store(sums + i, opwright::load(sums + i) + d);
  }
}

template <typename T>
using ForwardRow = void (*)(const T*, const compute_t<T>*, T*, int64_t);
template <typename T>
using BackwardRow = void (*)(const T*, const T*, const compute_t<T>*, T*, compute_t<T>*, int64_t);

// The same for any count. What does not fill a vector goes through copies that do, padded with
// zeros; bias and sums have room (they are blocks of whole vectors).
template <typename T>
void forward_any(ForwardRow<T> row, const T* input, const compute_t<T>* bias, T* output,
                 int64_t count) {
  const int64_t rest = count % kLanes<T>, whole = count - rest;
  row(input, bias, output, whole);
  if (rest == 0) return;
  T from[kLanes<T>] = {}, to[kLanes<T>];
  __builtin_memcpy(from, input + whole, rest * sizeof(T));
  row(from, bias + whole, to, kLanes<T>);
  __builtin_memcpy(output + whole, to, rest * sizeof(T));
}

template <typename T>
void backward_any(BackwardRow<T> row, const T* grad, const T* input, const compute_t<T>* bias,
                  T* grad_input, compute_t<T>* sums, int64_t count) {
  const int64_t rest = count % kLanes<T>, whole = count - rest;
  row(grad, input, bias, grad_input, sums, whole);
  if (rest == 0) return;
  T grads[kLanes<T>] = {}, from[kLanes<T>] = {}, to[kLanes<T>];
  __builtin_memcpy(grads, grad + whole, rest * sizeof(T));
  __builtin_memcpy(from, input + whole, rest * sizeof(T));
  row(grads, from, bias + whole, to, sums + whole, kLanes<T>);
  __builtin_memcpy(grad_input + whole, to, rest * sizeof(T));
}

// The one of three instantiations that the option names.
template <typename Row>
Row choose(Approximate approximate, Row none, Row tanh, Row quick) {
  return approximate == Approximate::none ? none : approximate == Approximate::tanh ? tanh : quick;
}

template <typename T>
void bias_gelu(View<const T, 2> input, View<const T, 1> bias, Approximate approximate,
               View<T, 2> output) {
  const Grid grid(input.size(0), input.size(1), kBlock);
  const auto row = choose(approximate, &forward_row<T, Approximate::none>,
                          &forward_row<T, Approximate::tanh>, &forward_row<T, Approximate::quick>);
  // Block by block, down the panels of each: a thread widens few blocks of bias.
  const int64_t pieces = grid.panels * grid.blocks;
  opwright::parallel_for(pieces, opwright::grain_of(grid.width), [&](int64_t begin, int64_t end) {
    Reader<T> inputs(input, grid);
    Bias<T> biases(bias, grid);
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / grid.panels, panel = i % grid.panels;
      T* to = output.data() + panel * grid.height * grid.n + block * grid.width;
      forward_any<T>(row, inputs.read(panel, block), biases.read(block), to,
                     grid.columns_in(panel, block));
    }
  });
}

// Memory that lives as long as its owner, not initialised.
template <typename S>
class Scratch {
 public:
  explicit Scratch(int64_t count) : data_(count > 0 ? new S[count] : nullptr) {}
  Scratch(const Scratch&) = delete;
  ~Scratch() { delete[] data_; }
  S* data() const { return data_; }

 private:
  S* data_;
};

// Adds the rows of a panel's sums, pair by pair, into the first n.
template <typename S>
void fold_panel(S* sums, const Grid& grid) {
  for (int64_t rows = grid.rows_in(0); rows > 1;) {
    const int64_t kept = (rows + 1) / 2;
    for (int64_t i = 0; i < (rows - kept) * grid.n; ++i) sums[i] += sums[kept * grid.n + i];
    rows = kept;
  }
}

template <typename T>
void bias_gelu_backward(View<const T, 2> grad_output, View<const T, 2> input, View<const T, 1> bias,
                        Approximate approximate, View<T, 2> grad_input, View<T, 1> grad_bias) {
  using S = compute_t<T>;
  const Grid grid(input.size(0), input.size(1), kBlock);
  const auto row = choose(approximate, &backward_row<T, Approximate::none>,
                          &backward_row<T, Approximate::tanh>,
                          &backward_row<T, Approximate::quick>);
  const int64_t parts = (grid.panels + kPanels - 1) / kPanels;
  // partial[part * n + column]; with one part the sums go to grad_bias at once.
  const Scratch<S> partial(parts > 1 ? parts * grid.n : 0);
  const int64_t part_panels = grid.panels < kPanels ? grid.panels : kPanels;
  const int64_t grain = opwright::grain_of(part_panels * grid.width);
  opwright::parallel_for(parts * grid.blocks, grain, [&](int64_t begin, int64_t end) {
    Reader<T> grads(grad_output, grid), inputs(input, grid);
    Bias<T> biases(bias, grid);
    S sums[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / parts, part = i % parts;
      for (S& sum : sums) sum = 0;
      const int64_t first = part * kPanels;
      const int64_t last = first + kPanels < grid.panels ? first + kPanels : grid.panels;
      for (int64_t panel = first; panel < last; ++panel) {
        T* to = grad_input.data() + panel * grid.height * grid.n + block * grid.width;
        backward_any<T>(row, grads.read(panel, block), inputs.read(panel, block),
                        biases.read(block), to, sums, grid.columns_in(panel, block));
      }
      fold_panel(sums, grid);
      const int64_t count = grid.height > 1 ? grid.n : grid.columns_in(0, block);
      const int64_t column = block * grid.width;
      if (parts > 1) {
        for (int64_t c = 0; c < count; ++c) partial.data()[part * grid.n + column + c] = sums[c];
      } else {
        for (int64_t c = 0; c < count; ++c) grad_bias.data()[column + c] = T(sums[c]);
      }
    }
  });
  if (parts == 1) return;
  // Parts are added pair by pair, in place: part i takes part i + step.
  opwright::parallel_for(grid.n, opwright::grain_of(parts), [&](int64_t begin, int64_t end) {
    for (int64_t step = 1; step < parts; step *= 2) {
      for (int64_t i = 0; i + step < parts; i += 2 * step) {
        S* to = partial.data() + i * grid.n;
        const S* from = to + step * grid.n;
        for (int64_t c = begin; c < end; ++c) to[c] += from[c];
      }
    }
    for (int64_t c = begin; c < end; ++c) grad_bias.data()[c] = T(partial.data()[c]);
  });
}

OPWRIGHT_KERNEL(bias_gelu, float, double, opwright::half, opwright::bfloat16)
OPWRIGHT_KERNEL(bias_gelu_backward, float, double, opwright::half, opwright::bfloat16)
