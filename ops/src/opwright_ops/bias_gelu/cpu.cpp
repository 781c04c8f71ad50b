// GELU(input + bias) and its gradients on the CPU, each in one pass. The formulas are
// opwright/math.h's; NOTES.md has the derivations and the measurements behind the constants.
#include <opwright/kernel.h>
#include <opwright/math.h>

using opwright::compute_t;
using opwright::kLanes;
using opwright::Vec;
using opwright::View;

// Columns that one piece of work covers. Bias and column sums of a block stay in the first-level
// cache beside the rows that stream by: 4 KiB of float each.
constexpr int64_t kBlock = 1024;
// Rows shorter than this are laid end to end into panels of up to kBlock columns, with the bias
// repeated: a row of 3 would leave most lanes of a vector idle and pay the loop's overhead.
constexpr int64_t kNarrow = 512;
// Panels whose bias gradient is summed column by column before the sums are paired up. It bounds
// the error of a sum to kPanels + log2(rows/kPanels) roundings, and does not depend on the number
// of threads, so neither does the result.
constexpr int64_t kPanels = 64;
// Room past the end of a block for a last vector that is not full.
constexpr int64_t kPadding = 64;

// How rows x n elements are cut: panels of `height` rows laid end to end, in blocks of `width`.
struct Grid {
  int64_t rows, n, height, panels, width, blocks;

  Grid(int64_t rows_, int64_t n_) : rows(rows_), n(n_) {
    height = n < kNarrow ? kBlock / n : 1;
    panels = (rows + height - 1) / height;
    blocks = (n + kBlock - 1) / kBlock;
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
  compute_t<T> buffer_[kBlock + kPadding];
};

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) return opwright::gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh) return opwright::gelu_tanh<T>(v);
  else return opwright::gelu_quick<T>(v);
}

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> d_gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) return opwright::d_gelu_none<T>(v);
  else if constexpr (kApproximate == Approximate::tanh) return opwright::d_gelu_tanh<T>(v);
  else return opwright::d_gelu_quick<T>(v);
}

// A whole vector, or its first `count` elements when that is less.
template <typename T>
OPWRIGHT_INLINE Vec<compute_t<T>> load_up_to(const T* from, int64_t count) {
  return count >= kLanes<T> ? opwright::load(from)
                            : opwright::load_partial(from, static_cast<int>(count));
}
template <typename T>
OPWRIGHT_INLINE void store_up_to(T* to, Vec<compute_t<T>> v, int64_t count) {
  if (count >= kLanes<T>) opwright::store(to, v);
  else opwright::store_partial(to, v, static_cast<int>(count));
}

// output = gelu(input + bias) for `count` adjacent elements; `bias` may be read kPadding beyond.
// One loop for whole and partial vectors, so that the formula is compiled once.
template <typename T, Approximate kApproximate>
void forward_row(const T* input, const compute_t<T>* bias, T* output, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const auto v = load_up_to(input + i, count - i) + opwright::load(bias + i);
    store_up_to(output + i, gelu<T, kApproximate>(v), count - i);
  }
}

// grad_input = grad * gelu'(input + bias), added to `sums` too. `bias` and `sums` may be accessed
// kPadding beyond `count`, where grad counts as 0.
template <typename T, Approximate kApproximate>
void backward_row(const T* grad, const T* input, const compute_t<T>* bias, T* grad_input,
                  compute_t<T>* sums, int64_t count) {
  for (int64_t i = 0; i < count; i += kLanes<T>) {
    const auto v = load_up_to(input + i, count - i) + opwright::load(bias + i);
    const auto d = load_up_to(grad + i, count - i) * d_gelu<T, kApproximate>(v);
    store_up_to(grad_input + i, d, count - i);
    opwright::store(sums + i, opwright::load(sums + i) + d);
  }
}

// The one of three instantiations that the option names.
template <typename Row>
Row choose(Approximate approximate, Row none, Row tanh, Row quick) {
  return approximate == Approximate::none ? none : approximate == Approximate::tanh ? tanh : quick;
}

template <typename T>
void bias_gelu(View<const T, 2> input, View<const T, 1> bias, Approximate approximate,
               View<T, 2> output) {
  const Grid grid(input.size(0), input.size(1));
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
      row(inputs.read(panel, block), biases.read(block), to, grid.columns_in(panel, block));
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
  const Grid grid(input.size(0), input.size(1));
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
    S sums[kBlock + kPadding];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / parts, part = i % parts;
      for (S& sum : sums) sum = 0;
      const int64_t first = part * kPanels;
      const int64_t last = first + kPanels < grid.panels ? first + kPanels : grid.panels;
      for (int64_t panel = first; panel < last; ++panel) {
        T* to = grad_input.data() + panel * grid.height * grid.n + block * grid.width;
        row(grads.read(panel, block), inputs.read(panel, block), biases.read(block), to, sums,
            grid.columns_in(panel, block));
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
