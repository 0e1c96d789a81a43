#include "cuda/cublas/product.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <utility>

namespace jaxcomm {
namespace cuda {
namespace {

std::pair<bool, cudaDataType> TypeOf(DType dtype) {
  switch (dtype) {
    case DType::kF16:
      return {true, CUDA_R_16F};
    case DType::kBF16:
      return {true, CUDA_R_16BF};
    case DType::kF32:
      return {true, CUDA_R_32F};
    case DType::kF64:
      return {true, CUDA_R_64F};
    default:
      return {false, CUDA_R_32F};
  }
}

// One handle per GPU, for all products and threads. Never destroyed: at exit, the driver may be gone before.
StatusOr<cublaslt::Handle> HandleOf(const CublasLtLibrary& library, int device) {
  static auto& mutex = *new std::mutex;
  static auto& handles = *new std::map<int, cublaslt::Handle>;
  std::lock_guard<std::mutex> lock(mutex);
  cublaslt::Handle& handle = handles[device];
  if (handle == nullptr) {
    if (const cublaslt::Result result = library.Create(&handle); result != 0) {
      handle = nullptr;
      return UnavailableError("cublasLtCreate: cuBLAS status " + std::to_string(result));
    }
  }
  return handle;
}

int64_t AlignUp(int64_t value, int64_t alignment) { return (value + alignment - 1) / alignment * alignment; }

std::string TextOf(const ProductShape& shape) {
  const auto [rows, columns] =
      shape.transposes_x ? std::pair{shape.contracted, shape.rows} : std::pair{shape.rows, shape.contracted};
  return std::string("a product of ") + Name(shape.operands) + "[" + std::to_string(rows) + ", " +
         std::to_string(columns) + (shape.transposes_x ? "]^T" : "]") + " and [" + std::to_string(shape.contracted) +
         ", " + std::to_string(shape.columns) + "] with result " + Name(shape.result);
}

}  // namespace

bool CanMultiply(DType operands, DType result) {
  if (!TypeOf(operands).first) return false;
  return result == operands || (result == DType::kF32 && ItemBytes(operands) == 2);
}

StatusOr<std::unique_ptr<Product>> Product::Make(const CublasLtLibrary& library, int device,
                                                 const ProductShape& shape) {
  std::unique_ptr<Product> made(new Product(library, shape));
  JAXCOMM_RETURN_IF_ERROR(WithPrefix(TextOf(shape) + ": ", made->Make(device)));
  return made;
}

Product::~Product() {
  if (operation_ != nullptr) library_.MatmulDescDestroy(operation_);
  for (const cublaslt::Layout layout : {w_, x_, y_}) {
    if (layout != nullptr) library_.MatrixLayoutDestroy(layout);
  }
}

Status Product::Check(const char* name, cublaslt::Result result) const {
  if (result == 0) return OkStatus();
  return UnavailableError(std::string(name) + ": cuBLAS status " + std::to_string(result) + " (" + library_.path + ")");
}

Status Product::Make(int device) {
  if (!CanMultiply(shape_.operands, shape_.result))
    return InvalidArgumentError("cuBLASLt does not multiply these types");
  if (shape_.rows == 0 || shape_.contracted == 0 || shape_.columns == 0) return OkStatus();  // nothing to multiply
  const StatusOr<cublaslt::Handle> handle = HandleOf(library_, device);
  JAXCOMM_RETURN_IF_ERROR(handle.status());
  handle_ = *handle;
  const bool wide = shape_.operands == DType::kF64;
  const bool rounds = shape_.tf32 && shape_.operands == DType::kF32;
  const int compute = wide ? cublaslt::kCompute64F : rounds ? cublaslt::kCompute32FFastTf32 : cublaslt::kCompute32F;
  JAXCOMM_RETURN_IF_ERROR(Check("cublasLtMatmulDescCreate",
                                library_.MatmulDescCreate(&operation_, compute, wide ? CUDA_R_64F : CUDA_R_32F)));
  if (shape_.transposes_x) {
    JAXCOMM_RETURN_IF_ERROR(Check(
        "cublasLtMatmulDescSetAttribute",
        library_.MatmulDescSetAttribute(operation_, cublaslt::kTransposeB, &cublaslt::kTransposed, sizeof(int32_t))));
  }
  // cuBLASLt's matrices are column-major. In this order, the arrays are the transposed matrices: y^T = w^T @ x^T.
  const auto [x_rows, x_columns] =
      shape_.transposes_x ? std::pair{shape_.contracted, shape_.rows} : std::pair{shape_.rows, shape_.contracted};
  const struct {
    cublaslt::Layout* layout;
    DType dtype;
    int64_t rows, columns;
  } layouts[] = {{&w_, shape_.operands, shape_.contracted, shape_.columns},
                 {&x_, shape_.operands, x_rows, x_columns},
                 {&y_, shape_.result, shape_.rows, shape_.columns}};
  for (const auto& made : layouts) {
    JAXCOMM_RETURN_IF_ERROR(
        Check("cublasLtMatrixLayoutCreate",
              library_.MatrixLayoutCreate(made.layout, TypeOf(made.dtype).second, static_cast<uint64_t>(made.columns),
                                          static_cast<uint64_t>(made.rows), made.columns)));
  }
  cublaslt::Preference preference = nullptr;
  JAXCOMM_RETURN_IF_ERROR(Check("cublasLtMatmulPreferenceCreate", library_.MatmulPreferenceCreate(&preference)));
  const Status found = FindAlgorithm(preference);
  library_.MatmulPreferenceDestroy(preference);
  return found;
}

Status Product::FindAlgorithm(cublaslt::Preference preference) {
  const auto set = [&](int attribute, const void* value, size_t bytes) {
    return Check("cublasLtMatmulPreferenceSetAttribute",
                 library_.MatmulPreferenceSetAttribute(preference, attribute, value, bytes));
  };
  const auto workspace = static_cast<uint64_t>(UsableWorkspaceBytes());
  JAXCOMM_RETURN_IF_ERROR(set(cublaslt::kMaxWorkspaceBytes, &workspace, sizeof workspace));
  // Sums of several blocks are added in the compute type, not in that of the result.
  const uint32_t reduction = cublaslt::kReduceInComputeType;
  JAXCOMM_RETURN_IF_ERROR(set(cublaslt::kReductionSchemes, &reduction, sizeof reduction));
  const auto alignment = static_cast<uint32_t>(shape_.alignment_bytes);
  for (const int attribute : cublaslt::kMinAlignmentBytes) {
    JAXCOMM_RETURN_IF_ERROR(set(attribute, &alignment, sizeof alignment));
  }
  cublaslt::Heuristic heuristic = {};
  int num_found = 0;
  const cublaslt::Result result =
      library_.MatmulAlgoGetHeuristic(handle_, operation_, w_, x_, y_, y_, preference, 1, &heuristic, &num_found);
  if (result != cublaslt::kNotSupported) JAXCOMM_RETURN_IF_ERROR(Check("cublasLtMatmulAlgoGetHeuristic", result));
  if (result == cublaslt::kNotSupported || num_found < 1 || heuristic.state != 0) {
    return UnavailableError(library_.path + " has no algorithm for it; pass another algorithm than \"fused\"");
  }
  algorithm_ = heuristic.algorithm;
  return OkStatus();
}

int64_t Product::UsableWorkspaceBytes() const {
  return std::max<int64_t>(0, shape_.workspace_bytes - kWorkspaceAlignmentBytes);
}

// The matrices share memory. Only the kernel's launch matters.
int64_t Product::scratch_bytes() const {
  const int64_t operand = ItemBytes(shape_.operands), result = ItemBytes(shape_.result);
  return AlignUp(std::max({shape_.rows * shape_.contracted * operand, shape_.contracted * shape_.columns * operand,
                           shape_.rows * shape_.columns * result}),
                 kWorkspaceAlignmentBytes) +
         shape_.workspace_bytes;
}

Status Product::EnqueueOn(void* scratch, cudaStream_t stream) const {
  char* const workspace = static_cast<char*>(scratch) + scratch_bytes() - shape_.workspace_bytes;
  JAXCOMM_RETURN_IF_ERROR(Enqueue(scratch, scratch, scratch, workspace, stream));
  return shape_.transposes_x ? Enqueue(scratch, scratch, scratch, workspace, stream, true) : OkStatus();
}

Status Product::Enqueue(const void* x, const void* w, void* y, void* workspace, cudaStream_t stream, bool adds) const {
  if (shape_.rows == 0 || shape_.columns == 0) return OkStatus();
  if (shape_.contracted == 0) {
    if (adds) return OkStatus();
    const auto bytes = static_cast<size_t>(shape_.rows * shape_.columns * ItemBytes(shape_.result));
    const cudaError_t result = cudaMemsetAsync(y, 0, bytes, stream);
    return result == cudaSuccess ? OkStatus()
                                 : UnavailableError(std::string("cudaMemsetAsync: ") + cudaGetErrorString(result));
  }
  for (const void* const address : {x, w, static_cast<const void*>(y)}) {
    if (reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(shape_.alignment_bytes) == 0) continue;
    return InvalidArgumentError("an array is not aligned to " + std::to_string(shape_.alignment_bytes) + " bytes");
  }
  const auto begin = static_cast<int64_t>(reinterpret_cast<uintptr_t>(workspace));
  void* const aligned = static_cast<char*>(workspace) + (AlignUp(begin, kWorkspaceAlignmentBytes) - begin);
  // Of the type in which cuBLASLt adds.
  const double one = 1, kept = adds ? 1 : 0;
  const float one_f32 = 1, kept_f32 = adds ? 1 : 0;
  const bool wide = shape_.operands == DType::kF64;
  const void* const alpha = wide ? static_cast<const void*>(&one) : &one_f32;
  const void* const beta = wide ? static_cast<const void*>(&kept) : &kept_f32;
  return Check("cublasLtMatmul",
               library_.Matmul(handle_, operation_, alpha, w, w_, x, x_, beta, y, y_, y, y_, &algorithm_, aligned,
                               static_cast<size_t>(UsableWorkspaceBytes()), stream));
}

}  // namespace cuda
}  // namespace jaxcomm
