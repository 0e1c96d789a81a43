// route and dispatch of few tokens in one exchange. moe_pack makes the message of a rank: its numbers, its expert ids,
// its rows. An all_gather sends it to all ranks. moe_unpack makes routing and rows from the messages of all ranks. Both
// handlers send nothing.
#include <algorithm>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "handlers/moe.h"

namespace jaxcomm {
namespace {

// The numbers of a call, which must be equal on all ranks.
struct Header {
  int64_t num_experts, capacity, align, slots, tokens, choices, payload_bytes, unused;
};
static_assert(sizeof(Header) == 64);

std::string Describe(const Header& header) {
  return "num_experts=" + std::to_string(header.num_experts) + ", capacity=" + std::to_string(header.capacity) +
         ", align=" + std::to_string(header.align) + ", slots=" + std::to_string(header.slots) + " and " +
         std::to_string(header.tokens) + " tokens of " + std::to_string(header.choices) + " choices and " +
         std::to_string(header.payload_bytes) + " bytes";
}

int64_t Aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// Expert ids, (tokens, choices), and the numbers of the routing.
ffi::ErrorOr<Header> MakeHeader(const ffi::Dictionary& attributes) {
  Header header = {};
  ffi::Error decoded = DecodeNumbers(attributes, {{"num_experts", &header.num_experts},
                                                  {"capacity", &header.capacity},
                                                  {"align", &header.align},
                                                  {"slots", &header.slots},
                                                  {"tokens", &header.tokens},
                                                  {"choices", &header.choices},
                                                  {"payload_bytes", &header.payload_bytes}});
  if (decoded.failure()) return ffi::Unexpected(std::move(decoded));
  return header;
}

int64_t IdBytes(const Header& header) {
  return Aligned(header.tokens * header.choices * static_cast<int64_t>(sizeof(int32_t)));
}

ffi::Error ExecuteMoePack(ffi::Dictionary attributes, ffi::Buffer<ffi::S32>, ffi::Buffer<ffi::S32> ids,
                          ffi::RemainingArgs payloads, ffi::ResultBuffer<ffi::U8> message) {
  const ffi::ErrorOr<Header> header = MakeHeader(attributes);
  if (!header) return header.error();
  int64_t bytes = static_cast<int64_t>(sizeof(Header)) + IdBytes(*header);
  for (size_t i = 0; i < payloads.size(); ++i) {
    const auto payload = payloads.get<ffi::AnyBuffer>(i);
    if (!payload) return payload.error();
    bytes += Aligned(static_cast<int64_t>(payload->size_bytes()));
  }
  if (bytes != static_cast<int64_t>(message->element_count()) ||
      static_cast<int64_t>(ids.element_count()) != header->tokens * header->choices) {
    return ffi::Error::InvalidArgument("moe_pack: the message has a wrong size");
  }
  uint8_t* next = message->typed_data();
  // The padding is part of the message.
  const auto append = [&next](const void* data, size_t size) {
    if (size > 0) std::memcpy(next, data, size);
    const auto end = static_cast<size_t>(Aligned(static_cast<int64_t>(size)));
    std::memset(next + size, 0, end - size);
    next += end;
  };
  append(&*header, sizeof(Header));
  append(ids.typed_data(), ids.size_bytes());
  for (size_t i = 0; i < payloads.size(); ++i) {
    const auto payload = payloads.get<ffi::AnyBuffer>(i);
    append(payload->untyped_data(), payload->size_bytes());
  }
  return ffi::Error::Success();
}

// The rows of one payload at rank `own`. `from`: its first byte in the message of rank 0.
void CopyRows(const Places& places, const GatheredChoices& gathered, int32_t own, const ExpertLayout& layout,
              const uint8_t* from, int64_t message_bytes, int64_t row_bytes, char* rows) {
  places.ForEachRow(gathered, own, [&](int64_t row, int32_t source, int64_t token) {
    std::memcpy(rows + row * row_bytes, from + source * message_bytes + token * row_bytes,
                static_cast<size_t>(row_bytes));
  });
  const int64_t local = layout.num_experts / layout.num_ranks;
  for (int64_t e = own * local; e < (own + 1) * local; ++e) {
    const int64_t end = places.start(e) + places.size(e);
    const int64_t next = e + 1 < (own + 1) * local ? places.start(e + 1) : layout.capacity;
    std::memset(rows + end * row_bytes, 0, static_cast<size_t>((next - end) * row_bytes));
  }
}

ffi::Error ExecuteMoeUnpack(ffi::RunId run, ffi::Dictionary attributes, ffi::Buffer<ffi::S32> rank,
                            ffi::Buffer<ffi::U8> messages, ffi::RemainingRets results) {
  const ffi::ErrorOr<Member> member = DecodeMember(attributes, rank);
  if (!member) return member.error();
  const ffi::ErrorOr<Header> header = MakeHeader(attributes);
  if (!header) return header.error();
  const CallSpec& spec = member->spec;
  const int64_t n = spec.group_size;
  if (results.size() < kRoutingFields || messages.element_count() % n != 0) {
    return ffi::Error::InvalidArgument(spec.Where() + ": results are missing");
  }
  const int64_t* const ranks = member->ranks();
  const int32_t own = member->own;
  const auto bytes = static_cast<int64_t>(messages.element_count()) / n;
  const uint8_t* const first = messages.typed_data();
  for (int64_t r = 1; r < n; ++r) {
    if (std::memcmp(first, first + r * bytes, sizeof(Header)) == 0) continue;
    Header one = {}, other = {};
    std::memcpy(&one, first, sizeof(Header));
    std::memcpy(&other, first + r * bytes, sizeof(Header));
    return FailRun(run, spec,
                   "calls do not match: rank " + std::to_string(ranks[0]) + " has " + Describe(one) + ", rank " +
                       std::to_string(ranks[r]) + " has " + Describe(other));
  }
  ExpertLayout layout;
  layout.num_ranks = static_cast<int32_t>(n);
  layout.num_experts = header->num_experts;
  layout.capacity = header->capacity;
  layout.align = header->align;
  layout.slots = header->slots;
  GatheredChoices gathered;
  gathered.tokens = header->tokens;
  gathered.choices = header->choices;
  for (int64_t r = 0; r < n; ++r) {
    gathered.ids.push_back(reinterpret_cast<const int32_t*>(first + r * bytes + sizeof(Header)));
  }
  const int64_t total = layout.num_experts;
  std::vector<int32_t> counts(static_cast<size_t>(n * (total + 1)));
  gathered.Count(total, counts.data());
  const Status status = CheckRouting(counts.data(), layout, true, ranks);
  if (!status.ok()) return FailRun(run, spec, status.message());

  const Places places(layout, counts.data());
  const ffi::ErrorOr<RoutingFields> fields = DecodeFields(spec, results, layout, gathered.tokens * gathered.choices);
  if (!fields) return fields.error();
  FillFields(layout, gathered, own, counts.data(), counts.data(), *fields);

  int64_t offset = static_cast<int64_t>(sizeof(Header)) + IdBytes(*header);
  for (size_t i = kRoutingFields; i < results.size(); ++i) {
    auto rows = results.get<ffi::AnyBuffer>(i);
    if (!rows) return rows.error();
    const auto size = static_cast<int64_t>((*rows)->size_bytes());
    const int64_t row_bytes = layout.capacity > 0 ? size / layout.capacity : 0;
    if (offset + Aligned(row_bytes * gathered.tokens) > bytes) {
      return ffi::Error::InvalidArgument(spec.Where() + ": a message is too short");
    }
    if (row_bytes > 0) {
      CopyRows(places, gathered, own, layout, first + offset, bytes, row_bytes,
               static_cast<char*>((*rows)->untyped_data()));
    }
    offset += Aligned(row_bytes * gathered.tokens);
  }
  return ffi::Error::Success();
}

}  // namespace

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoePackExecute, ExecuteMoePack,
                              BindAttributes()
                                  .Arg<ffi::Buffer<ffi::S32>>()   // expert ids
                                  .RemainingArgs()                // payloads
                                  .Ret<ffi::Buffer<ffi::U8>>());  // the message

XLA_FFI_DEFINE_HANDLER_SYMBOL(MoeUnpackExecute, ExecuteMoeUnpack,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::RunId>()
                                  .Attrs()
                                  .Arg<ffi::Buffer<ffi::S32>>()  // logical id of this device
                                  .Arg<ffi::Buffer<ffi::U8>>()   // messages of all ranks
                                  .RemainingRets());             // the fields of Routing, then the rows of each payload

}  // namespace jaxcomm
