// GELU(input + bias) and its gradients on the CPU, each in one pass. The formulas are
// opwright/math.h's; NOTES.md has the derivations and the measurements behind the constants.
#include <opwright/kernel.h>
#include <opwright/math.h>

using opwright::compute_t;
using opwright::kLanes;
using opwright::Vec;
using opwright::View;

// Whether the tanh form spends five instructions of 29 to be right to 3 ulp where the result is
// tiny. In float it does not: that makes (512, 4096) 16 % faster, and the error grows to 9 ulp at
// -4 and 113 ulp at -11 (eager has lost every digit from -6 on).
template <typename T>
constexpr bool kExactTail = sizeof(T) == 8;

// Columns that one piece of work covers. Bias and column sums of a block (16 KiB each in float)
// stay in the caches beside the rows that stream by. Narrower blocks cut the stream into pieces:
// blocks of 1024 columns took 6 % longer backward at (512, 4096) float32.
constexpr int64_t kBlock = 4096;
// Columns of a panel (see kNarrow), and of no more than one block in any type.
constexpr int64_t kPanelColumns = 1024;
// Rows shorter than this are laid end to end into panels of up to kPanelColumns, with the bias
// repeated: a row of 3 would leave most lanes of a vector idle and pay the loop's overhead.
constexpr int64_t kNarrow = 512;
// Most panels whose bias gradient is summed column by column before the sums are paired up. It
// bounds the error of a sum to kPanels + log2(rows/kPanels) roundings.
constexpr int64_t kPanels = 64;
// Work is cut into about this many parts (each writes and reads a row of sums: 16 parts cost 3 % at
// (512, 4096), 32 cost 7 %), unless a part would have fewer elements than kPartElements.
constexpr int64_t kParts = 8;
constexpr int64_t kPartElements = 2 * opwright::kGrainElements;
// Rows of a tensor without unit stride that are copied at once: in a transposed one, neighbouring
// rows share cache lines (64 bytes). The padding keeps their copies out of one set of the cache.
constexpr int64_t kTile = 32;
constexpr int64_t kTilePadding = 32;
// Bytes ahead of the loop that are fetched, of the outputs too. The loop is long enough to keep the
// hardware's prefetcher from running ahead: (512, 4096) float32 takes 14 % longer without.
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

// One block of one panel of a tensor as adjacent elements: its own memory, or a copy.
template <typename T>
class Reader {
 public:
  Reader(View<const T, 2> view, const Grid& grid)
      : view_(view),
        grid_(grid),
        row_(view.stride(0)),
        column_(grid.n == 1 ? 1 : view.stride(1)),
        is_adjacent_(column_ == 1 && (grid.height == 1 || row_ == grid.n)),
        tile_(grid.height == 1 && row_ != 0 && row_ < column_ ? kTile : 1),
        pitch_(grid.width + kTilePadding),
        copies_(is_adjacent_ ? 0 : tile_ * pitch_) {}

  const T* read(int64_t panel, int64_t block) {
    const int64_t offset = block * grid_.width * column_;
    if (is_adjacent_) return view_.data() + panel * grid_.height * row_ + offset;
    const bool is_copied = block == block_ && panel >= first_ && panel < last_;
    if (!is_copied) {
      block_ = block;
      first_ = panel;
      last_ = panel + tile_ < grid_.panels ? panel + tile_ : grid_.panels;
      const T* from = view_.data() + panel * grid_.height * row_ + offset;
      const int64_t columns = grid_.columns_in(panel, block);
      if (grid_.height == 1)
        copy(from, last_ - first_, columns, pitch_);
      else
        copy(from, columns / grid_.n, grid_.n, grid_.n);
      // An expanded gradient has the same row everywhere; only the last panel may be shorter.
      if (row_ == 0) last_ = grid_.panels;
    }
    return copies_.data() + (tile_ == 1 ? 0 : (panel - first_) * pitch_);
  }

 private:
  // Along the smaller stride, so that every cache line is read once. Not inlined: one copy of the
  // loops for each type keeps the compile short.
  __attribute__((noinline)) void copy(const T* from, int64_t rows, int64_t columns, int64_t pitch) {
    T* to = copies_.data();
    if (row_ < column_) {
      for (int64_t c = 0; c < columns; ++c) {
        for (int64_t r = 0; r < rows; ++r) to[r * pitch + c] = from[r * row_ + c * column_];
      }
    } else {
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) to[r * pitch + c] = from[r * row_ + c * column_];
      }
    }
  }

  View<const T, 2> view_;
  const Grid& grid_;
  int64_t row_, column_;
  bool is_adjacent_;
  int64_t tile_, pitch_;
  Scratch<T> copies_;
  int64_t block_ = -1, first_ = 0, last_ = 0;
};

// The bias of a block, widened and repeated for each row of a panel.
template <typename T>
class Bias {
 public:
  Bias(View<const T, 1> view, const Grid& grid) : view_(view), grid_(grid) {}

  __attribute__((noinline)) const compute_t<T>* read(int64_t block) {
    if (block != block_) {
      block_ = block;
      const int64_t count = grid_.columns_in(0, block);
      const int64_t n = count < grid_.n ? count : grid_.n;
      const T* from = view_.data() + block * grid_.width * view_.stride(0);
      int64_t i = 0;
      if (view_.stride(0) == 1) {
        for (; i + kLanes<T> <= n; i += kLanes<T>) {
          opwright::store(buffer_ + i, opwright::load(from + i));
        }
      }
      for (; i < n; ++i) buffer_[i] = from[i * view_.stride(0)];
      for (i = n; i < count; ++i) buffer_[i] = buffer_[i - n];
      for (; i % kLanes<T> != 0; ++i) buffer_[i] = 0;
    }
    return buffer_;
  }

 private:
  View<const T, 1> view_;
  const Grid& grid_;
  int64_t block_ = -1;
  compute_t<T> buffer_[kBlock];  // whole vectors of it are filled, as far as a block goes
};

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) {
    return opwright::gelu_none<T>(v);
  } else if constexpr (kApproximate == Approximate::tanh) {
    return opwright::gelu_tanh<T, kExactTail<T>>(v);
  } else {
    return opwright::gelu_quick<T>(v);
  }
}

template <typename T, Approximate kApproximate>
OPWRIGHT_INLINE Vec<compute_t<T>> d_gelu(Vec<compute_t<T>> v) {
  if constexpr (kApproximate == Approximate::none) {
    return opwright::d_gelu_none<T>(v);
  } else if constexpr (kApproximate == Approximate::tanh) {
    return opwright::d_gelu_tanh<T>(v);
  } else {
    return opwright::d_gelu_quick<T>(v);
  }
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
  const auto row =
      choose(approximate, &backward_row<T, Approximate::none>, &backward_row<T, Approximate::tanh>,
             &backward_row<T, Approximate::quick>);
  // From the shape alone, not from the number of threads: the result is the same for any.
  int64_t part_panels = (grid.panels + kParts - 1) / kParts;
  const int64_t least = (kPartElements + grid.width - 1) / grid.width;
  if (part_panels < least) part_panels = least;
  if (part_panels > kPanels) part_panels = kPanels;
  const int64_t parts = (grid.panels + part_panels - 1) / part_panels;
  // partial[part * n + column]; with one part the sums go to grad_bias at once.
  const Scratch<S> partial(parts > 1 ? parts * grid.n : 0);
  const int64_t grain =
      opwright::grain_of((grid.panels < part_panels ? grid.panels : part_panels) * grid.width);
  opwright::parallel_for(parts * grid.blocks, grain, [&](int64_t begin, int64_t end) {
    Reader<T> grads(grad_output, grid), inputs(input, grid);
    Bias<T> biases(bias, grid);
    S sums[kBlock];
    for (int64_t i = begin; i < end; ++i) {
      const int64_t block = i / parts, part = i % parts;
      // Not all of `sums`: at one row of few columns that would be most of the time.
      const int64_t summed = grid.columns_in(0, block) + kLanes<T> - 1;
      for (int64_t c = 0; c < summed / kLanes<T> * kLanes<T>; ++c) sums[c] = 0;
      const int64_t first = part * part_panels;
      const int64_t last = first + part_panels < grid.panels ? first + part_panels : grid.panels;
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
