// How a call site captures its arguments: one byte for the class of each, eight for its value.
//
// The class is what Triton specialises a kernel on: the dtype of a pointer and whether its address
// is a multiple of 16; for an integer, by its value, 32 or 64 bits, a multiple of 16, or 1. The
// bytes are the key of the kernel's table, so they are computed without a branch that could miss.
#pragma once

#include <cstdint>
#include <cstring>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include "opwright/triton/dtype.h"
#include "opwright/triton/value.h"

namespace opwright::triton {

inline constexpr int kUnknownDevice = -1;
inline constexpr int kHostDevice = -2;

// A pointer with its element type, and the GPU that it belongs to if that is known.
struct Pointer {
  const void* address = nullptr;
  DType dtype = DType::none;
  int device = kUnknownDevice;
};

// How a tensor type of yours becomes a Pointer: specialise as_pointer<Tensor> with a static
// `Pointer get(const Tensor&)`. An undefined tensor is Pointer{}: the kernel receives None.
template <typename T>
struct as_pointer;

// A tensor descriptor made on the host: the kernel loads and stores blocks through the GPU's TMA
// unit.
struct TensorDescriptor {
  Pointer base;
  std::vector<int64_t> shape;    // elements
  std::vector<int64_t> strides;  // elements; the last one is 1
  std::vector<int64_t> block;    // elements
  bool pads_with_nan = false;    // what is read outside of the shape: NaN instead of zeros
  bool rounds_to_tf32 = false;   // fp32 elements, Triton 3.7 and later
};

// An argument given by its name; after those given by position.
template <size_t N>
struct Name {
  char text[N];
  constexpr Name(const char (&name)[N]) {
    for (size_t i = 0; i < N; ++i) text[i] = name[i];
  }
  constexpr std::string_view view() const { return {text, N - 1}; }
};
template <Name kName, typename T>
struct Named {
  const T& value;
};
// kernel(stream, grid, x, y, named<"BLOCK">(cx(128))).
template <Name kName, typename T>
Named<kName, T> named(const T& value) {
  return {value};
}

namespace detail {

// The low six bits of an argument's byte.
enum Kind : uint8_t {
  kAbsent = 0,
  kI32,
  kI64,
  kU64,
  kU1,
  kFloat,
  kNone,
  kTuple,       // its elements' bytes are in the payload
  kTupleEnd,    // only there
  kDescriptor,  // payload: hash of dtype and block
  kConstInt,    // payload: the value
  kConstUnsigned,
  kConstFloat,
  kConstBool,
  kConstNone,
  kConstDType,
  kConstText,
  kConstFunction,
  kConstTuple,    // payload: hash
  kConstDynamic,  // payload: hash of the value's text
  kPointer = 32,  // + DType
};
inline constexpr uint8_t kKindBits = 0x3f;
// The high two: what the kernel may be specialised on.
inline constexpr uint8_t kDivisible = 0x40;
inline constexpr uint8_t kOne = 0x80;

inline constexpr uint64_t kHostBit = 1ull << 63;

template <typename T>
inline constexpr bool kIsConstant = false;
template <typename T>
inline constexpr bool kIsConstant<Constant<T>> = true;
template <typename T>
inline constexpr bool kIsOptional = false;
template <typename T>
inline constexpr bool kIsOptional<std::optional<T>> = true;
template <typename T>
inline constexpr bool kIsNamed = false;
template <Name kName, typename T>
inline constexpr bool kIsNamed<Named<kName, T>> = true;

template <typename T>
concept Tensor = requires(const T& tensor) {
  { as_pointer<T>::get(tensor) } -> std::same_as<Pointer>;
};

template <typename A>
struct Shape;  // slots and payload words of an argument type

template <typename Tuple, typename Sequence>
struct TupleShape;
template <typename Tuple, size_t... I>
struct TupleShape<Tuple, std::index_sequence<I...>> {
  static constexpr size_t slots = (Shape<std::tuple_element_t<I, Tuple>>::slots + ... + 0);
  static constexpr size_t inner = (Shape<std::tuple_element_t<I, Tuple>>::payload + ... + 0);
  static constexpr size_t payload = (sizeof...(I) + 1 + 7) / 8 + inner;
};
template <typename A>
struct Shape {
  static constexpr size_t slots = std::is_floating_point_v<A> ? 2 : 1;
  static constexpr size_t payload = kIsConstant<A> || std::is_same_v<A, TensorDescriptor> ? 1 : 0;
};
template <typename... T>
struct Shape<std::tuple<T...>> : TupleShape<std::tuple<T...>, std::index_sequence_for<T...>> {};
template <typename A, typename B>
struct Shape<std::pair<A, B>> : TupleShape<std::pair<A, B>, std::index_sequence<0, 1>> {};
template <typename T>
struct Shape<std::optional<T>> : Shape<T> {
  static_assert(Shape<T>::payload == 0, "std::optional holds a pointer, a tensor or a number");
};
template <Name kName, typename T>
struct Shape<Named<kName, T>> : Shape<T> {};

template <typename T>
constexpr Kind constant_kind() {
  if (std::is_same_v<T, bool>) return kConstBool;
  if (std::is_same_v<T, std::nullptr_t>) return kConstNone;
  if (std::is_same_v<T, DType>) return kConstDType;
  if (std::is_same_v<T, Function>) return kConstFunction;
  if (kIsText<T>) return kConstText;
  if (kIsTuple<T>) return kConstTuple;
  if (std::is_floating_point_v<T>) return kConstFloat;
  return kIsUnsigned<T> && sizeof(T) == 8 ? kConstUnsigned : kConstInt;
}

template <typename T>
uint64_t constant_payload(const T& value) {
  if constexpr (std::is_same_v<T, std::nullptr_t>) {
    return 0;
  } else if constexpr (std::is_same_v<T, Function>) {
    return hash_text(value.name);
  } else if constexpr (!std::is_same_v<T, DType> && kIsText<T>) {
    return hash_text(value);
  } else if constexpr (kIsTuple<T>) {
    uint64_t hash = std::tuple_size_v<T>;
    std::apply(
        [&](const auto&... items) {
          ((hash = mix(mix(hash, constant_kind<std::decay_t<decltype(items)>>()),
                       constant_payload(items))),
           ...);
        },
        value);
    return hash;
  } else if constexpr (std::is_floating_point_v<T>) {
    const double wide = static_cast<double>(value);
    uint64_t bits;
    std::memcpy(&bits, &wide, 8);
    return bits;
  } else {
    return static_cast<uint64_t>(value);
  }
}

uint64_t descriptor_payload(const TensorDescriptor& descriptor);
std::string descriptor_text(const TensorDescriptor& descriptor);

// Where the next value, payload word and tensor's device go.
struct Cursor {
  uint64_t* slot;
  uint64_t* payload;
  uint64_t devices;  // bit d: a tensor of GPU d; kHostBit: one that is on no GPU
};

inline void note_device(int device, Cursor& at) {
  if (device >= 63) return;
  if (device >= 0) {
    at.devices |= 1ull << device;
  } else if (device == kHostDevice) {
    at.devices |= kHostBit;
  }
}

inline uint8_t encode_pointer(const Pointer& pointer, Cursor& at) {
  const uint64_t address = reinterpret_cast<uint64_t>(pointer.address);
  *at.slot++ = address;
  if (pointer.dtype == DType::none) return kNone;
  note_device(pointer.device, at);
  const int kind = kPointer + static_cast<int>(pointer.dtype);
  return static_cast<uint8_t>(kind | (address % 16 == 0 ? int{kDivisible} : 0));
}

template <typename A>
inline __attribute__((always_inline)) uint8_t encode(const A& argument, Cursor& at) {
  if constexpr (std::is_same_v<A, Pointer>) {
    return encode_pointer(argument, at);
  } else if constexpr (Tensor<A>) {
    return encode_pointer(as_pointer<A>::get(argument), at);
  } else if constexpr (std::is_same_v<A, std::nullptr_t> || std::is_same_v<A, std::nullopt_t>) {
    *at.slot++ = 0;
    return kNone;
  } else if constexpr (std::is_pointer_v<A>) {
    using T = std::remove_cv_t<std::remove_pointer_t<A>>;
    static_assert(!std::is_void_v<T>,
                  "a void* has no dtype: pass opwright::triton::Pointer{address, "
                  "DType::fp32}");
    return encode_pointer({argument, dtype_of<T>::value}, at);
  } else if constexpr (kIsOptional<A>) {
    if (argument) return encode(*argument, at);
    *at.slot++ = 0;
    return kNone;
  } else if constexpr (std::is_same_v<A, bool>) {
    *at.slot++ = argument;
    return kU1;
  } else if constexpr (std::is_integral_v<A> || std::is_enum_v<A>) {
    const uint64_t bits = static_cast<uint64_t>(argument);
    const int64_t value = static_cast<int64_t>(bits);
    *at.slot++ = bits;
    int kind = value == static_cast<int32_t>(value) ? kI32 : kI64;
    if (kIsUnsigned<A> && sizeof(A) == 8 && value < 0) kind = kU64;
    return static_cast<uint8_t>(kind | (value % 16 == 0 ? int{kDivisible} : 0) |
                                (value == 1 ? int{kOne} : 0));
  } else if constexpr (std::is_floating_point_v<A>) {
    const double wide = static_cast<double>(argument);
    const float narrow = static_cast<float>(argument);
    at.slot[0] = 0;
    std::memcpy(at.slot, &narrow, 4);
    std::memcpy(at.slot + 1, &wide, 8);
    at.slot += 2;
    return kFloat;
  } else if constexpr (kIsConstant<A>) {
    *at.slot++ = 0;
    *at.payload++ = constant_payload(argument.value);
    return constant_kind<decltype(argument.value)>();
  } else if constexpr (std::is_same_v<A, TensorDescriptor>) {
    *at.slot++ = reinterpret_cast<uint64_t>(&argument);
    *at.payload++ = descriptor_payload(argument);
    note_device(argument.base.device, at);
    return kDescriptor;
  } else if constexpr (kIsNamed<A>) {
    return encode(argument.value, at);
  } else {
    static_assert(kIsTuple<A>,
                  "a kernel takes pointers, numbers, bools, tensors (see as_pointer), "
                  "TensorDescriptor, std::tuple of these, nullptr, and cx(...)");
    constexpr size_t count = std::tuple_size_v<A>;
    uint8_t codes[(count + 8) / 8 * 8] = {};
    uint64_t* words = at.payload;
    at.payload += sizeof codes / 8;
    std::apply(
        [&](const auto&... items) {
          size_t index = 0;
          ((codes[index++] = encode(items, at)), ...);
        },
        argument);
    codes[count] = kTupleEnd;
    std::memcpy(words, codes, sizeof codes);
    return kTuple;
  }
}

// Appends the texts of the values that are only hashed in the key, in the order of their payloads.
template <typename A>
void append_texts(const A& argument, std::vector<std::string>& texts) {
  if constexpr (kIsConstant<A>) {
    texts.push_back(value_text(argument.value));
  } else if constexpr (std::is_same_v<A, TensorDescriptor>) {
    texts.push_back(descriptor_text(argument));
  } else if constexpr (kIsNamed<A>) {
    append_texts(argument.value, texts);
  } else if constexpr (kIsTuple<A>) {
    std::apply([&](const auto&... items) { (append_texts(items, texts), ...); }, argument);
  }
}

// What the runtime sees of a call. The arrays live on the call site's stack.
struct Call {
  uint64_t* words;  // the key: bytes of the arguments, payloads, then what the runtime appends
  uint64_t* slots;  // the values; two more follow for the scratch pointers
  uint64_t devices;
  uint16_t code_words;
  uint16_t word_count;  // without what the runtime appends
  uint16_t argument_count;
  uint16_t slot_count;
  const std::string_view* names;  // of the last name_count arguments
  uint16_t name_count;
  uint32_t full_word_count;  // filled in by find: with what was appended
  uint64_t hash;             // and the hash of all of them
};

// Room for the values of heuristics and autotune keys.
inline constexpr size_t kExtraWords = 16;

template <typename A>
inline constexpr std::string_view kNameOf = {};
template <Name kName, typename T>
inline constexpr std::string_view kNameOf<Named<kName, T>> = kName.view();

template <typename... A>
struct Capture {
  static constexpr size_t kCodeWords = (sizeof...(A) + 7) / 8;
  static constexpr size_t kNames = (static_cast<size_t>(kIsNamed<A>) + ... + 0);
  static constexpr size_t kWords =
      kCodeWords + (Shape<A>::payload + ... + 0) + (kNames > 0 ? 1 : 0);
  static constexpr size_t kSlots = (Shape<A>::slots + ... + 0);
  static constexpr std::string_view kAllNames[sizeof...(A) + 1] = {kNameOf<A>..., {}};
  static constexpr bool names_come_last() {
    const bool is_named[] = {kIsNamed<A>..., true};
    for (size_t i = 0; i < sizeof...(A); ++i) {
      if (is_named[i] != (i >= sizeof...(A) - kNames)) return false;
    }
    return true;
  }

  uint64_t words[kWords + kExtraWords];
  uint64_t slots[kSlots + 2];
  Call call;

  inline __attribute__((always_inline)) explicit Capture(const A&... arguments) {
    static_assert(names_come_last(), "arguments by name come after those by position");
    uint8_t codes[kCodeWords * 8 + 1] = {};
    Cursor at{slots, words + kCodeWords, 0};
    size_t index = 0;
    ((codes[index++] = encode(arguments, at)), ...);
    std::memcpy(words, codes, kCodeWords * 8);
    if constexpr (kNames > 0) {
      static const uint64_t order = [] {
        uint64_t hash = kNames;
        for (std::string_view name : kAllNames) hash = mix(hash, hash_text(name));
        return hash;
      }();
      *at.payload = order;
    }
    at.slot[0] = at.slot[1] = 0;
    call = {words,
            slots,
            at.devices,
            kCodeWords,
            kWords,
            sizeof...(A),
            static_cast<uint16_t>(at.slot - slots),
            kAllNames + sizeof...(A) - kNames,
            kNames,
            0,
            0};
  }
};

}  // namespace detail
}  // namespace opwright::triton
