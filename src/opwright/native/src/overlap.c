// Which written tensors share memory, with themselves or with others. Decided here for every tensor
// that a kernel writes into: mutated arguments and those of the out variant.
#include "call.h"

// One unknown of an equation: `step` times a whole number from `low` to `high`.
typedef struct {
  i64 step, low, high;
} Term;

// A tensor that has elements has fewer than 64 axes longer than 1, whatever their number.
enum { kMaxTerms = 2 * 64 + 1, kMaxVisits = 10000 };

static i64 element_size(i32 dtype) {
  switch (dtype) {
    case 0:
    case 1:
    case 11:
      return 1;  // uint8, int8, bool
    case 2:
    case 5:
    case 15:
      return 2;  // int16, float16, bfloat16
    case 3:
    case 6:
      return 4;  // int32, float32
    default:
      return 8;
  }
}

// Terms by falling step, equal steps next to each other.
static void sort_terms(Term* terms, i32 count) {
  for (i32 i = 1; i < count; ++i) {
    const Term term = terms[i];
    i32 at = i;
    for (; at > 0 && terms[at - 1].step < term.step; --at) terms[at] = terms[at - 1];
    terms[at] = term;
  }
}

// Rounded down; `b` is positive.
static i64 divide_down(i64 a, i64 b) { return a / b - (a % b < 0); }

static i64 greatest_divisor(i64 a, i64 b) {
  while (b) {
    const i64 rest = a % b;
    a = b;
    b = rest;
  }
  return a;
}

// True when the terms can sum to `target`, and when that takes too many steps to tell. Steps are
// positive and fall, so at each level few values leave a rest that the levels below can reach.
static int can_sum_to(const Term* terms, i32 count, i64 target, i32* visits) {
  if (!count) return target == 0;
  if (++*visits > kMaxVisits) return 1;
  i64 low = 0, high = 0, divisor = 0;  // of the levels below
  for (i32 i = 1; i < count; ++i) {
    low += terms[i].step * terms[i].low;
    high += terms[i].step * terms[i].high;
    divisor = greatest_divisor(terms[i].step, divisor);
  }
  if (target % greatest_divisor(terms->step, divisor)) return 0;
  const i64 first = max_of(terms->low, -divide_down(high - target, terms->step));
  const i64 last = min_of(terms->high, divide_down(target - low, terms->step));
  for (i64 value = first; value <= last; ++value) {
    if (can_sum_to(terms + 1, count - 1, target - terms->step * value, visits)) return 1;
  }
  return 0;
}

static i64 magnitude(i64 value) { return value < 0 ? -value : value; }

// True when two indices of the tensor lead to one element.
static int overlaps_itself(const Tensor* t) {
  if (is_contiguous(t) || !numel(t)) return 0;
  Term terms[kMaxTerms];
  i32 count = 0;
  for (i64 d = 0; d < t->ndim; ++d) {
    if (t->sizes[d] == 1) continue;
    if (!t->strides[d]) return 1;
    terms[count++] = (Term){magnitude(t->strides[d]), 1 - t->sizes[d], t->sizes[d] - 1};
  }
  sort_terms(terms, count);
  // Two indices differ by a vector that is not zero; its first entry that is not zero can be taken
  // as positive.
  for (i32 i = 0, visits = 0; i < count; ++i) {
    terms[i].low = 1;
    if (can_sum_to(terms + i, count - i, 0, &visits)) return 1;
  }
  return 0;
}

// The memory of one tensor: the bytes from `begin` to `end`.
typedef struct {
  i64 begin, end;
  Tensor* tensor;
  const char* name;  // null for a tensor of the out variant
  i32 is_written;
} Span;

static int make_span(Call* call, Tensor* t, const char* name, i32 is_written, Span* span) {
  const void* data;
  const i64 bytes = element_size(t->dtype);
  SHIM(call, torch_get_const_data_ptr(t->handle, &data));
  *span = (Span){(i64)data, (i64)data + bytes, t, name, is_written};
  for (i64 d = 0; d < t->ndim; ++d) {
    const i64 reach = (t->sizes[d] - 1) * t->strides[d] * bytes;
    *(reach < 0 ? &span->begin : &span->end) += reach;
  }
  return 0;
}

static void add_terms(const Tensor* t, Term* terms, i32* count) {
  const i64 bytes = element_size(t->dtype);
  for (i64 d = 0; d < t->ndim; ++d) {
    if (t->sizes[d] == 1 || !t->strides[d]) continue;
    const i64 step = magnitude(t->strides[d]) * bytes;
    i32 at = 0;
    while (at < *count && terms[at].step != step) ++at;
    if (at == *count) terms[(*count)++] = (Term){step, 0, 0};
    terms[at].high += t->sizes[d] - 1;
  }
}

// True when the two have a byte in common; their spans do.
static int share_memory(const Span* one, const Span* other) {
  if (is_contiguous(one->tensor) && is_contiguous(other->tensor)) return 1;
  // Both count upwards from the lowest byte: i steps in the one, j in the other, and within an
  // element.
  Term terms[kMaxTerms], others[kMaxTerms];
  i32 count = 0, num_others = 0, visits = 0;
  add_terms(one->tensor, terms, &count);
  add_terms(other->tensor, others, &num_others);
  for (i32 i = 0; i < num_others; ++i) {
    i32 at = 0;
    while (at < count && terms[at].step != others[i].step) ++at;
    if (at == count) terms[count++] = (Term){others[i].step, 0, 0};
    terms[at].low -= others[i].high;
  }
  const i64 within = element_size(one->tensor->dtype) - 1,
            within_other = element_size(other->tensor->dtype) - 1;
  if (within || within_other) {
    i32 at = 0;
    while (at < count && terms[at].step != 1) ++at;
    if (at == count) terms[count++] = (Term){1, 0, 0};
    terms[at].high += within;
    terms[at].low -= within_other;
  }
  sort_terms(terms, count);
  return can_sum_to(terms, count, other->begin - one->begin, &visits);
}

static int by_begin(const void* one, const void* other) {
  const i64 a = ((const Span*)one)->begin, b = ((const Span*)other)->begin;
  return (a > b) - (a < b);
}

static int refuse_pair(Call* call, const Span* one, const Span* other) {
  const char* name = one->name ? one->name : other->name;
  if (!name) FAIL(call, "%s: two tensors of out share memory", call->op->name);
  if (!one->name || !other->name) {
    FAIL(call, "%s: out shares memory with `%s`, which is written too", call->op->name, name);
  }
  FAIL(call, "%s: `%s` is written and shares memory with `%s`", call->op->name,
       one->is_written ? one->name : other->name, one->is_written ? other->name : one->name);
}

// Neighbours in memory are compared, so that a list of thousands of tensors takes one sort.
static int check_spans(Call* call, Span* spans, u64 count) {
  for (u64 i = 0; i < count; ++i) {
    if (spans[i].is_written && overlaps_itself(spans[i].tensor)) {
      FAIL(call, "%s: `%s` has elements that share memory, and cannot be written into",
           call->op->name, spans[i].name ? spans[i].name : "out");
    }
  }
  qsort(spans, count, sizeof *spans, by_begin);
  for (u64 i = 0; i < count; ++i) {
    for (u64 j = i + 1; j < count && spans[j].begin < spans[i].end; ++j) {
      Span *one = &spans[i], *other = &spans[j];
      if (!(one->is_written | other->is_written) || !share_memory(one, other)) continue;
      // An `out` may lie on an argument that is only read: the kernel writes into memory of its
      // own.
      const Span* out = !one->name ? one : other;
      if (out->name || (one->is_written & other->is_written)) return refuse_pair(call, one, other);
      out->tensor->is_shared = 1;
    }
  }
  return 0;
}

int opwright_check_written(Call* call) {
  const Operator* op = call->op;
  i32 writes = call->gives_out;
  u64 count = (u64)op->num_outputs;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    writes |= op->arguments[i].mutated;
    count += (u64)call->values[i].count;
  }
  if (!writes) return 0;
  Span few[16];
  Span* spans = count <= 16 ? few : malloc(count * sizeof *spans);
  if (!spans) FAIL(call, "%s: there is no memory for a list of %llu tensors", op->name, count);
  count = 0;
  int failed = 0;
  for (i32 i = 0; i < op->num_arguments; ++i) {
    for (i64 k = 0; k < call->values[i].count && !failed; ++k) {
      Tensor* t = &call->values[i].tensors[k];
      if (numel(t))
        failed =
            make_span(call, t, op->arguments[i].name, op->arguments[i].mutated, &spans[count++]);
    }
  }
  for (i32 i = 0; call->gives_out && i < op->num_outputs && !failed; ++i) {
    if (numel(&call->outputs[i]))
      failed = make_span(call, &call->outputs[i], 0, 1, &spans[count++]);
  }
  failed = failed || check_spans(call, spans, count);
  if (spans != few) free(spans);
  return failed;
}
