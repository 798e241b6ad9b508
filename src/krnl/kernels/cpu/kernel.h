// What a kernel is handed, and how it makes itself known.
//
// The plan is a list of Dispatch records; run() walks it. Arguments stand in the order of the op's signature,
// a group (`*`) as `group` consecutive ones, an optional argument that is missing with data == nullptr.
// Rank-0 members of a group have a shape with a zero in it. Rows are contiguous: there are no strides.
#pragma once
#include <cstdint>

namespace krnl {

enum class Type : int32_t { f32 = 0, f16 = 1, bf16 = 2, i32 = 3 };

struct Argument {
  void* data;
  int64_t shape[3];  // unused entries are 1
  Type type;
  int32_t dimensions;

  explicit operator bool() const { return data != nullptr; }
  template <class T>
  T* as() const { return static_cast<T*>(data); }
};

struct Dispatch {
  void (*kernel)(const Dispatch&);
  const Argument* arguments;
  const double* attributes;  // in the order of the reference's keyword arguments
  void* workspace;           // bytes as table.py asked, 64-byte aligned; holds nothing on entry
  int64_t workspace_bytes;
  int32_t argument_count;
  int32_t group;  // members of the op's group, 1 if it has none

  const Argument& operator[](int i) const { return arguments[i]; }
  int64_t live(int i) const { return *arguments[i].as<int32_t>(); }
};

// Hands out a dispatch's arguments one after the other, as the op's signature has them.
class Arguments {
 public:
  explicit Arguments(const Dispatch& dispatch) : next_(dispatch.arguments) {}

  const Argument& one() { return *next_++; }
  const Argument* many(int count) {
    next_ += count;
    return next_ - count;
  }
  int64_t live() { return *one().as<int32_t>(); }

 private:
  const Argument* next_;
};

using Kernel = void (*)(const Dispatch&);

// A kernel registers under the name by which table.py calls it: KRNL_KERNEL("rms_norm", rms_norm);
struct Registration {
  Registration(const char* name, Kernel kernel);
};
#define KRNL_KERNEL(name, function) static const krnl::Registration registration_##function(name, function)

}  // namespace krnl
