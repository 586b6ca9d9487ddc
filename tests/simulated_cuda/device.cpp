// A CUDA device for a build of torch that has none. Its memory is the host's and its kernels are the CPU's, so it
// computes what the CPU computes; but a tensor on it is a CUDA tensor to Python, to autograd and to every check of
// devices. simulated_cuda.py builds and loads it, and says what it can and cannot show.

#include <ATen/EmptyTensor.h>
#include <ATen/ATen.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <map>
#include <mutex>
#include <set>
#include <string>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IntArrayRef;
using c10::Stream;

const Device kCuda(c10::DeviceType::CUDA, 0);

// ---- Memory, which is counted

std::atomic<int64_t> allocated{0};
std::atomic<int64_t> peak{0};

struct Block {
  void* memory;
  size_t size;
};

void free_block(void* context) {
  auto* block = static_cast<Block*>(context);
  allocated -= static_cast<int64_t>(block->size);
  free(block->memory);
  delete block;
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* memory = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&memory, 64, size) == 0, "out of memory");
    const int64_t now = allocated += static_cast<int64_t>(size);
    int64_t most = peak;
    while (most < now && !peak.compare_exchange_weak(most, now)) {}
    return {memory, new Block{memory, size}, &free_block, kCuda};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

Memory memory;

// Memory of the host that is pinned: ordinary, but known by its address, as FSDP pins again what it finds is not.

std::mutex pinned_lock;
std::map<const char*, const char*> pinned;  // ends by beginnings

void free_pinned(void* block) {
  {
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.erase(static_cast<const char*>(block));
  }
  free(block);
}

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t size) override {
    void* block = nullptr;
    TORCH_CHECK(size == 0 || posix_memalign(&block, 64, size) == 0, "out of memory");
    std::lock_guard<std::mutex> held(pinned_lock);
    if (block != nullptr) pinned[static_cast<char*>(block)] = static_cast<char*>(block) + size;
    return {block, block, &free_pinned, at::kCPU};
  }
  void copy_data(void* to, const void* from, size_t size) const override { memcpy(to, from, size); }
};

PinnedMemory pinned_memory;

bool is_pinned(const void* address) {
  std::lock_guard<std::mutex> held(pinned_lock);
  auto after = pinned.upper_bound(static_cast<const char*>(address));
  return after != pinned.begin() && static_cast<const char*>(address) < std::prev(after)->second;
}

// ---- The device: one, with one stream on which everything has already happened

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return kCuda; }
  Device getDevice() const override { return kCuda; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return Stream(Stream::DEFAULT, kCuda); }
  Stream getDefaultStream(Device) const override { return Stream(Stream::DEFAULT, kCuda); }
  Stream exchangeStream(Stream) const override { return Stream(Stream::DEFAULT, kCuda); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_memory; }
  bool isPinnedPtr(const void* address) const override { return is_pinned(address); }
};

Hooks hooks;

const bool is_installed = [] {
  c10::SetAllocator(c10::DeviceType::CUDA, &memory, 100);
  // torch has made hooks that report no device, and keeps them: they get our virtual functions. Both have no members.
  auto& theirs = const_cast<at::CUDAHooksInterface&>(at::detail::getCUDAHooks());
  *reinterpret_cast<void**>(&theirs) = *reinterpret_cast<void**>(static_cast<at::CUDAHooksInterface*>(&hooks));
  return true;
}();

// ---- Tensors between the two

// Returns a CPU tensor in the memory of one of the device; others as they are.
Tensor on_host(const Tensor& tensor) {
  if (!tensor.defined() || !tensor.is_cuda()) return tensor;
  auto forget = [](void* kept) { delete static_cast<Tensor*>(kept); };
  c10::DataPtr data(tensor.storage().mutable_data(), new Tensor(tensor), forget, at::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), tensor.storage().nbytes(), std::move(data));
  auto alias = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), DispatchKeySet(DispatchKey::CPU), tensor.dtype());
  alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  return alias;
}

Tensor made_strided(IntArrayRef size, IntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype));
}

Tensor made(IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<Device>,
             std::optional<bool>, std::optional<at::MemoryFormat> format) {
  return at::detail::empty_generic(size, &memory, DispatchKeySet(DispatchKey::CUDA), c10::dtype_or_default(dtype), format);
}

// Returns a copy on the device of what a CPU kernel made.
Tensor on_device(const Tensor& tensor) {
  if (!tensor.defined() || tensor.is_cuda()) return tensor;
  Tensor copy = made_strided(tensor.sizes(), tensor.strides(), tensor.scalar_type(), {}, {}, {});
  on_host(copy).copy_(tensor);
  return copy;
}

// ---- Views and changes of storage, which share memory

Tensor strided_view(const Tensor& self, IntArrayRef size, IntArrayRef stride, std::optional<int64_t> offset) {
  auto view = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), self.dtype());
  view.unsafeGetTensorImpl()->set_sizes_and_strides(size, stride, offset.value_or(self.storage_offset()));
  return view;
}

Tensor like_view(const Tensor& self, const Tensor& view) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(self.storage()), self.key_set(), view.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides(), view.storage_offset());
  return made;
}

Tensor reshaped_view(const Tensor& self, IntArrayRef size) { return like_view(self, on_host(self).view(size)); }
Tensor retyped_view(const Tensor& self, at::ScalarType dtype) { return like_view(self, on_host(self).view(dtype)); }
Tensor aliased_view(const Tensor& self, IntArrayRef size, IntArrayRef stride) { return strided_view(self, size, stride, {}); }
Tensor unfolded_view(const Tensor& self, int64_t dim, int64_t size, int64_t step) {
  return like_view(self, on_host(self).unfold(dim, size, step));
}

Tensor& copied(Tensor& self, const Tensor& source, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor& set_part(Tensor& self, at::Storage source, int64_t offset, IntArrayRef size, IntArrayRef stride) {
  auto* made = self.unsafeGetTensorImpl();
  made->set_storage_keep_dtype(std::move(source));
  made->set_storage_offset(offset);
  if (stride.empty()) made->set_sizes_contiguous(size);
  else made->set_sizes_and_strides(size, stride, offset);
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source) {
  const auto count = static_cast<int64_t>(source.nbytes() / self.element_size());
  return set_part(self, std::move(source), 0, {count}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_part(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

void resize_storage(const Tensor& tensor, int64_t size) {
  auto* storage = tensor.storage().unsafeGetStorageImpl();
  auto data = memory.allocate(size);
  const auto kept = std::min<size_t>(size, storage->nbytes());
  if (kept) memcpy(data.get(), storage->data(), kept);
  storage->set_data_ptr_noswap(std::move(data));
  storage->set_nbytes(size);
}

const Tensor& resized(const Tensor& self, IntArrayRef size, std::optional<at::MemoryFormat>) {
  const auto needed = (c10::multiply_integers(size) + self.storage_offset()) * self.element_size();
  if (needed > static_cast<int64_t>(self.storage().nbytes())) resize_storage(self, needed);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  return self;
}

// The attention that is made of products: a CPU has no kernels by the names of CUDA's.
int64_t plain_attention(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&, double, bool,
                        std::optional<double>, bool) {
  return 0;
}

// ---- Everything else runs on the CPU, in the same memory

const std::set<std::string> takes_indices_of_the_cpu = {
    "aten::index.Tensor", "aten::index.Tensor_out", "aten::index_put_", "aten::_index_put_impl_"};

void run_on_host(const c10::OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto& arguments = schema.arguments();
  const auto name = schema.name() + (schema.overload_name().empty() ? "" : "." + schema.overload_name());
  const size_t first = stack->size() - arguments.size();
  const std::vector<c10::IValue> given(stack->begin() + first, stack->end());
  bool has_host = false, has_device = false;
  std::vector<std::pair<Tensor, Tensor>> written;  // of the device, and what the kernel writes

  auto moved = [&](const Tensor& tensor, bool is_written) {
    if (!tensor.defined()) return tensor;
    has_device |= tensor.is_cuda();
    has_host |= !tensor.is_cuda() && tensor.dim() > 0;
    if (!tensor.is_cuda()) return tensor;
    const bool is_empty = is_written && tensor.numel() == 0;  // which the kernel may resize
    Tensor host = is_empty ? at::empty(tensor.sizes(), at::TensorOptions(tensor.dtype())) : on_host(tensor);
    if (is_written) written.emplace_back(tensor, host);
    return host;
  };
  for (size_t index = 0; index < arguments.size(); ++index) {
    auto& value = (*stack)[first + index];
    const auto* alias = arguments[index].alias_info();
    const bool is_written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = moved(value.toTensor(), is_written);
    } else if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = moved(tensor, false);
      value = tensors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> tensors;
      for (const auto& tensor : value.toOptionalTensorVector())
        tensors.push_back(tensor ? std::optional<Tensor>(moved(*tensor, false)) : std::nullopt);
      value = tensors;
    } else if (value.isDevice()) {
      value = Device(at::kCPU);
    }
  }
  const bool may_mix = takes_indices_of_the_cpu.count(name) && given[0].toTensor().is_cuda();
  TORCH_CHECK(!(has_host && has_device) || may_mix,
              "Expected all tensors to be on the same device, but ", name, " got cuda:0 and cpu");
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);

  for (auto& [target, host] : written) {
    if (target.numel() == 0 && host.numel() > 0) set_tensor(target, on_device(host));
    TORCH_CHECK(target.sizes() == host.sizes(), name, " resized what it wrote into");
  }
  const auto& returns = schema.returns();
  for (size_t index = 0; index < returns.size(); ++index) {
    auto& value = (*stack)[stack->size() - returns.size() + index];
    const auto* alias = returns[index].alias_info();
    if (value.isTensorList()) {
      auto tensors = value.toTensorVector();
      for (auto& tensor : tensors) tensor = on_device(tensor);
      value = tensors;
    } else if (value.isTensor()) {
      value = on_device(value.toTensor());
      for (size_t number = 0; alias && alias->isWrite() && number < given.size(); ++number) {
        const auto* source = arguments[number].alias_info();
        if (source && *source == *alias && given[number].isTensor()) value = given[number];
      }
    }
  }
}

TORCH_LIBRARY_IMPL(_, CUDA, library) { library.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", made);
  library.impl("empty_strided", made_strided);
  library.impl("as_strided", strided_view);
  library.impl("view", reshaped_view);
  library.impl("view.dtype", retyped_view);
  library.impl("_reshape_alias", aliased_view);
  library.impl("unfold", unfolded_view);
  library.impl("copy_", copied);
  library.impl("resize_", resized);
  library.impl("set_.source_Storage_storage_offset", set_part);
  library.impl("set_.source_Storage", set_storage);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_fused_sdp_choice", plain_attention);
  for (const auto* name : {"convolution", "convolution_backward"})  // which would look for kernels of CUDA themselves
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

// Collectives, by gloo. Their tensors are written in place, or are lists of lists that are.
TORCH_LIBRARY_IMPL(c10d, CUDA, library) {
  for (const auto* name : {"allreduce_", "broadcast_", "reduce_", "allgather_", "_allgather_base_", "_reduce_scatter_base_",
                           "reduce_scatter_", "alltoall_", "alltoall_base_", "gather_", "scatter_", "send", "recv_",
                           "allgather_into_tensor_coalesced_", "reduce_scatter_tensor_coalesced_", "allreduce_coalesced_"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
}

TORCH_LIBRARY(simulated_cuda, library) {
  library.def("resize_storage(Tensor tensor, int size) -> ()", resize_storage);
  library.def("on_host(Tensor(a) tensor) -> Tensor(a)", on_host);
  library.def("allocated() -> int", [] { return allocated.load(); });
  library.def("peak() -> int", [] { return peak.load(); });
  library.def("forget_peak() -> ()", [] { peak = allocated.load(); });
}

}  // namespace
