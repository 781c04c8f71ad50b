// TMA descriptors: the arguments of the encoding, written into the 128 bytes.
//
// A driver's layout is not documented; here two maps are equal if and only if the arguments are.
//   0   address                      68  box, 5 x u16 (im2col: 0)
//   8   bits 0..7 data type, 8..10 rank, 11..12 interleave, 13..15 swizzle, 16..17 L2 promotion,
//       18 fill with NaN, 19 im2col, 21 always set: Triton from 3.7 on clears that bit of a small
//       tensor's map under drivers up to 13.1
//   16  dimensions - 1, 5 x u32      78  im2col: corners, 2 x 3 x i16, channels and pixels, 2 x u16
//   36  strides, 4 x u64             94  element strides, 5 x u8
#include "stub_driver.h"

#include <string.h>

enum { kAtBits = 8, kAtDims = 16, kAtStrides = 36, kAtBox = 68, kAtIm2col = 78, kAtSteps = 94 };
enum { kFillNan = 1 << 18, kIm2col = 1 << 19, kSmallTensorBit = 1 << 21 };
enum { kMaxRank = 5, kLastType = 15 };

// Bytes of an element by CUtensorMapDataType; 4-bit types count as 1 here.
static const int kElementSize[kLastType + 1] = {1, 2, 4, 4, 8, 8, 2, 4, 8, 2, 4, 4, 4, 1, 1, 1};

typedef struct {
  int type;
  unsigned rank;
  uint64_t address;
  const uint64_t *dims, *strides;
  const unsigned* steps;
  int interleave, swizzle, promotion, fill;
} Tensor;

static Result write_tensor(unsigned char* map, const Tensor* tensor) {
  unsigned rank = tensor->rank;
  if (map == NULL || (uintptr_t)map % 64 != 0 || tensor->dims == NULL || tensor->steps == NULL)
    return kInvalidValue;
  if (tensor->type < 0 || tensor->type > kLastType || rank < 1 || rank > kMaxRank)
    return kInvalidValue;
  if (tensor->interleave < 0 || tensor->interleave > 2 || tensor->swizzle < 0 ||
      tensor->swizzle > 6 || tensor->promotion < 0 || tensor->promotion > 3 || tensor->fill < 0 ||
      tensor->fill > 1)
    return kInvalidValue;
  if (tensor->interleave != 0 && rank < 3) return kInvalidValue;
  unsigned alignment = tensor->interleave == 2 ? 32 : 16;
  if (tensor->address % alignment != 0 || (rank > 1 && tensor->strides == NULL))
    return kInvalidValue;
  memset(map, 0, 128);
  memcpy(map, &tensor->address, 8);
  uint64_t bits = (uint64_t)tensor->type | (uint64_t)rank << 8 |
                  (uint64_t)tensor->interleave << 11 | (uint64_t)tensor->swizzle << 13 |
                  (uint64_t)tensor->promotion << 16 | (tensor->fill ? kFillNan : 0) |
                  kSmallTensorBit;
  memcpy(map + kAtBits, &bits, 8);
  for (unsigned i = 0; i < rank; i++) {
    if (tensor->dims[i] == 0 || tensor->dims[i] > 1ull << 32) return kInvalidValue;
    uint32_t last = (uint32_t)(tensor->dims[i] - 1);
    memcpy(map + kAtDims + 4 * i, &last, 4);
    if (tensor->steps[i] == 0 || tensor->steps[i] > 8) return kInvalidValue;
    map[kAtSteps + i] = (unsigned char)tensor->steps[i];
    if (i + 1 == rank) break;
    uint64_t stride = tensor->strides[i];
    if (stride % alignment != 0 || stride >= 1ull << 40) return kInvalidValue;
    memcpy(map + kAtStrides + 8 * i, &stride, 8);
  }
  return kSuccess;
}

// The innermost row of a box: a multiple of 16 bytes, within the swizzle's span.
static bool fits_swizzle(int type, unsigned elements, int swizzle) {
  static const unsigned kSpan[7] = {0, 32, 64, 128, 128, 128, 128};
  if (type >= 13) return true;  // 4- and 6-bit types have rules of their own
  unsigned bytes = elements * (unsigned)kElementSize[type];
  return bytes % 16 == 0 && (swizzle == 0 || bytes <= kSpan[swizzle]);
}

API Result cuTensorMapEncodeTiled(unsigned char* map, int type, unsigned rank, void* address,
                                  const uint64_t* dims, const uint64_t* strides,
                                  const unsigned* box, const unsigned* steps, int interleave,
                                  int swizzle, int promotion, int fill) {
  ENTER(cuTensorMapEncodeTiled);
  Tensor tensor = {type,  rank,       (uint64_t)address, dims,      strides,
                   steps, interleave, swizzle,           promotion, fill};
  if (box == NULL) return kInvalidValue;
  Result result = write_tensor(map, &tensor);
  for (unsigned i = 0; result == kSuccess && i < rank; i++) {
    if (box[i] == 0 || box[i] > 256) return kInvalidValue;
    uint16_t size = (uint16_t)box[i];
    memcpy(map + kAtBox + 2 * i, &size, 2);
  }
  if (result == kSuccess && interleave == 0 && !fits_swizzle(type, box[0], swizzle))
    return kInvalidValue;
  return result;
}

API Result cuTensorMapEncodeIm2col(unsigned char* map, int type, unsigned rank, void* address,
                                   const uint64_t* dims, const uint64_t* strides, const int* lower,
                                   const int* upper, unsigned channels, unsigned pixels,
                                   const unsigned* steps, int interleave, int swizzle,
                                   int promotion, int fill) {
  ENTER(cuTensorMapEncodeIm2col);
  Tensor tensor = {type,  rank,       (uint64_t)address, dims,      strides,
                   steps, interleave, swizzle,           promotion, fill};
  if (lower == NULL || upper == NULL || rank < 3) return kInvalidValue;
  if (channels == 0 || channels > 256 || pixels == 0 || pixels > 1024) return kInvalidValue;
  Result result = write_tensor(map, &tensor);
  if (result != kSuccess) return result;
  for (unsigned i = 0; i + 2 < rank; i++) {
    int16_t corners[2] = {(int16_t)lower[i], (int16_t)upper[i]};
    memcpy(map + kAtIm2col + 4 * i, corners, 4);
  }
  uint16_t sizes[2] = {(uint16_t)channels, (uint16_t)pixels};
  memcpy(map + kAtIm2col + 12, sizes, 4);
  map[kAtBits + 2] |= kIm2col >> 16;
  return kSuccess;
}
