// Compares ffi/transport/ucp_abi.h with the headers of an installed UCX, at compile time.
#include <ucp/api/ucp.h>
#include <ucs/type/status.h>

#include <cstdio>
#include <type_traits>

#include "../../ffi/transport/ucp_abi.h"
#include "../check.h"

namespace {

namespace own = jaxcomm::ucp;

static_assert(UCP_API_MAJOR == own::kApiMajor && UCP_API_MINOR >= own::kApiMinor, "another major version");
static_assert(sizeof(ucs_status_t) == sizeof(own::Status), "status");
static_assert(UCS_OK == own::kOk && UCS_INPROGRESS == own::kInProgress && UCS_ERR_BUSY == own::kBusy, "status");
static_assert(UCS_ERR_CANCELED == own::kCanceled && UCS_ERR_LAST == own::kLastError, "status");

// A field has the same offset and size as UCX's.
#define SAME_FIELD(theirs, their_field, ours, our_field)                                         \
  static_assert(offsetof(theirs, their_field) == offsetof(ours, our_field), #theirs #our_field); \
  static_assert(sizeof(theirs::their_field) == sizeof(ours::our_field), #theirs #our_field)
// Structures are at least as large as UCX's, in case UCX copies whole structures.
#define LARGE_ENOUGH(theirs, ours) static_assert(sizeof(ours) >= sizeof(theirs), #theirs)

SAME_FIELD(ucp_params_t, field_mask, own::ContextParams, mask);
SAME_FIELD(ucp_params_t, features, own::ContextParams, features);
SAME_FIELD(ucp_params_t, estimated_num_eps, own::ContextParams, estimated_num_eps);
LARGE_ENOUGH(ucp_params_t, own::ContextParams);
static_assert(UCP_PARAM_FIELD_FEATURES == own::ContextParams::kFeatures, "mask");
static_assert(UCP_PARAM_FIELD_ESTIMATED_NUM_EPS == own::ContextParams::kEstimatedNumEps, "mask");
static_assert(UCP_FEATURE_WAKEUP == own::ContextParams::kWakeup, "feature");
static_assert(UCP_FEATURE_AM == own::ContextParams::kActiveMessages, "feature");

SAME_FIELD(ucp_worker_params_t, field_mask, own::WorkerParams, mask);
SAME_FIELD(ucp_worker_params_t, thread_mode, own::WorkerParams, thread_mode);
LARGE_ENOUGH(ucp_worker_params_t, own::WorkerParams);
static_assert(UCP_WORKER_PARAM_FIELD_THREAD_MODE == own::WorkerParams::kThreadMode, "mask");
static_assert(UCS_THREAD_MODE_SERIALIZED == own::WorkerParams::kSerialized, "thread mode");

SAME_FIELD(ucp_ep_params_t, field_mask, own::EndpointParams, mask);
SAME_FIELD(ucp_ep_params_t, address, own::EndpointParams, address);
SAME_FIELD(ucp_ep_params_t, err_mode, own::EndpointParams, error_mode);
SAME_FIELD(ucp_ep_params_t, err_handler.cb, own::EndpointParams, on_error);
SAME_FIELD(ucp_ep_params_t, err_handler.arg, own::EndpointParams, on_error_arg);
LARGE_ENOUGH(ucp_ep_params_t, own::EndpointParams);
static_assert(UCP_EP_PARAM_FIELD_REMOTE_ADDRESS == own::EndpointParams::kAddress, "mask");
static_assert(UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE == own::EndpointParams::kErrorMode, "mask");
static_assert(UCP_EP_PARAM_FIELD_ERR_HANDLER == own::EndpointParams::kErrorHandler, "mask");
static_assert(UCP_ERR_HANDLING_MODE_PEER == own::EndpointParams::kReportPeers, "error mode");

SAME_FIELD(ucp_am_recv_param_t, recv_attr, own::ReceivedParams, attributes);
static_assert(UCP_AM_RECV_ATTR_FLAG_RNDV == own::ReceivedParams::kRendezvous, "attribute");

SAME_FIELD(ucp_am_handler_param_t, field_mask, own::HandlerParams, mask);
SAME_FIELD(ucp_am_handler_param_t, id, own::HandlerParams, id);
SAME_FIELD(ucp_am_handler_param_t, flags, own::HandlerParams, flags);
SAME_FIELD(ucp_am_handler_param_t, cb, own::HandlerParams, callback);
SAME_FIELD(ucp_am_handler_param_t, arg, own::HandlerParams, arg);
LARGE_ENOUGH(ucp_am_handler_param_t, own::HandlerParams);
static_assert(UCP_AM_HANDLER_PARAM_FIELD_ID == own::HandlerParams::kId, "mask");
static_assert(UCP_AM_HANDLER_PARAM_FIELD_FLAGS == own::HandlerParams::kFlags, "mask");
static_assert(UCP_AM_HANDLER_PARAM_FIELD_CB == own::HandlerParams::kCallback, "mask");
static_assert(UCP_AM_HANDLER_PARAM_FIELD_ARG == own::HandlerParams::kArg, "mask");
static_assert(UCP_AM_FLAG_WHOLE_MSG == own::HandlerParams::kWholeMessage, "flag");

SAME_FIELD(ucp_request_param_t, op_attr_mask, own::RequestParams, mask);
SAME_FIELD(ucp_request_param_t, flags, own::RequestParams, flags);
SAME_FIELD(ucp_request_param_t, cb.send, own::RequestParams, sent);
SAME_FIELD(ucp_request_param_t, cb.recv_am, own::RequestParams, received);
SAME_FIELD(ucp_request_param_t, user_data, own::RequestParams, user_data);
LARGE_ENOUGH(ucp_request_param_t, own::RequestParams);
static_assert(UCP_OP_ATTR_FIELD_CALLBACK == own::RequestParams::kCallback, "mask");
static_assert(UCP_OP_ATTR_FIELD_USER_DATA == own::RequestParams::kUserData, "mask");
static_assert(UCP_OP_ATTR_FIELD_FLAGS == own::RequestParams::kFlags, "mask");
static_assert(UCP_AM_SEND_FLAG_EAGER == own::RequestParams::kEager, "flag");
static_assert(UCP_AM_SEND_FLAG_RNDV == own::RequestParams::kRendezvous, "flag");
static_assert(UCP_EP_CLOSE_FLAG_FORCE == own::RequestParams::kForce, "flag");

// Functions have the same number of arguments, each of the same size. Pointers to UCX's types may be pointers to ours.
template <typename Theirs, typename Ours>
constexpr bool Passes() {
  return sizeof(Theirs) == sizeof(Ours) && std::is_pointer<Theirs>::value == std::is_pointer<Ours>::value;
}
template <typename Theirs, typename Ours>
struct Same : std::false_type {};
template <typename R, typename... A, typename OwnR, typename... OwnA>
struct Same<R (*)(A...), OwnR (*)(OwnA...)> {
  static constexpr bool Check() {
    if constexpr (sizeof...(A) != sizeof...(OwnA)) {
      return false;
    } else if constexpr (std::is_void<R>::value || std::is_void<OwnR>::value) {
      return std::is_same<R, OwnR>::value && (Passes<A, OwnA>() && ...);
    } else {
      return Passes<R, OwnR>() && (Passes<A, OwnA>() && ...);
    }
  }
  static constexpr bool value = Check();
};

#define SAME_FUNCTION(result, name, parameters) \
  static_assert(Same<decltype(&::name), decltype(own::Functions::name)>::value, #name);
JAXCOMM_UCP_FUNCTIONS(SAME_FUNCTION)
// The two callbacks.
static_assert(Same<ucp_am_recv_callback_t, decltype(own::HandlerParams::callback)>::value, "callback");
static_assert(Same<ucp_err_handler_cb_t, decltype(own::EndpointParams::on_error)>::value, "callback");
static_assert(Same<ucp_send_nbx_callback_t, decltype(own::RequestParams::sent)>::value, "callback");
static_assert(Same<ucp_am_recv_data_nbx_callback_t, decltype(own::RequestParams::received)>::value, "callback");

}  // namespace

// The compiler has checked everything.
TEST_CASE("jaxcomm's declarations of UCX match UCX's headers") {
  std::printf("UCX %d.%d\n", UCP_API_MAJOR, UCP_API_MINOR);
}
