// The submodule jaxcomm._core.transfer.
#include "transfer/transfer_py.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "common/duration.h"
#include "transfer/cache_pages.h"
#include "transfer/endpoint.h"
#include "transfer/memory_pool.h"
#include "transfer/moves.h"

namespace nb = nanobind;

namespace jaxcomm {
namespace {

using Numbers = std::vector<int64_t>;
// Address, item size, sizes, strides in bytes, the dimension of pages or -1, the pages.
using ArrayArgument = std::tuple<uint64_t, int64_t, Numbers, Numbers, int32_t, Numbers>;
using PieceArgument = std::tuple<uint32_t, Numbers, Numbers>;
// Connection, lease, boxes there, boxes here.
using SourceArgument = std::tuple<int32_t, uint64_t, std::vector<PieceArgument>, std::vector<PieceArgument>>;
using ErrorResult = std::pair<int32_t, std::string>;

std::vector<StridedArray> ArraysOf(const std::vector<ArrayArgument>& arguments) {
  std::vector<StridedArray> arrays;
  for (const auto& [address, item_bytes, sizes, strides, page_dimension, pages] : arguments) {
    arrays.push_back({reinterpret_cast<char*>(address), item_bytes, sizes, strides, page_dimension, pages});
  }
  return arrays;
}

std::vector<Piece> PiecesOf(const std::vector<PieceArgument>& arguments) {
  std::vector<Piece> pieces;
  for (const auto& [array, begin, end] : arguments) pieces.push_back({array, {begin, end}});
  return pieces;
}

constexpr double kSignalsEveryS = 0.2;  // a wait notices Ctrl-C as often

double SecondsSince(std::chrono::steady_clock::time_point began) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - began).count();
}

ErrorResult ResultOf(const Error& error) { return {static_cast<int32_t>(error.code), error.text}; }

template <typename T>
T ValueOrRaise(StatusOr<T> value) {
  if (!value.ok()) throw nb::value_error(value.status().message().c_str());
  return *std::move(value);
}

uint64_t Microseconds(std::chrono::steady_clock::duration time) {
  return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::microseconds>(time).count());
}

std::map<std::string, uint64_t> NamedTraffic(const TcpNetwork::PeerTraffic& traffic) {
  return {{"tcp_sent_bytes", traffic.tcp.sent_bytes},
          {"tcp_received_bytes", traffic.tcp.received_bytes},
          {"shared_memory_sent_bytes", traffic.shared_memory.sent_bytes},
          {"shared_memory_received_bytes", traffic.shared_memory.received_bytes}};
}

std::map<std::string, uint64_t> StatsOf(const EndpointStats& stats) {
  std::map<std::string, uint64_t> named = {
      {"rejected_connections", stats.rejected},
      {"leases", static_cast<uint64_t>(stats.num_leases)},
      {"leases_granted", stats.source.granted},
      {"leases_renewed", stats.source.renewed},
      {"leases_expired", stats.source.expired},
      {"leases_revoked", stats.source.revoked},
      {"reads_served", stats.source.reads},
      {"requests_refused", stats.source.refused},
      {"open_us", stats.opens.sum_us()},
      {"read_us", stats.reads.sum_us()},
      {"read_wait_us", Microseconds(stats.stages.wait)},
      {"read_wire_us", Microseconds(stats.stages.wire)},
      {"read_place_us", Microseconds(stats.stages.place)},
      {"read_commit_us", Microseconds(stats.stages.commit)},
  };
  for (const auto& [name, bytes] : NamedTraffic({})) named[name] = 0;
  for (const auto& [peer, traffic] : stats.traffic) {
    for (const auto& [name, bytes] : NamedTraffic(traffic)) named[name] += bytes;
  }
  const char* const names[] = {"", "unknown", "gone", "revoked", "lost", "timeout", "invalid", "cancelled"};  // by Code
  for (size_t code = 1; code < stats.failures.size(); ++code) {
    named[std::string("failures_") + names[code]] = stats.failures[code];
  }
  return named;
}

}  // namespace

void BindTransfer(nb::module_ m) {
  nb::class_<Call>(m, "Call", "A request to another endpoint.")
      .def_prop_ro("done", [](const Call& call) { return call.done.load(); })
      .def_ro("retry", &Call::retry)
      .def_ro("peer", &Call::peer, "The connection; of a call that has ended, that of its latest source.")
      .def_ro("version", &Call::version)
      .def_ro("lease", &Call::lease)
      .def_prop_ro("manifest", [](const Call& call) { return nb::bytes(call.manifest.data(), call.manifest.size()); });
  nb::class_<Endpoint>(m, "Endpoint", "An endpoint of transfers, with a thread of its own.")
      .def_prop_ro("address", &Endpoint::address)
      .def_prop_ro("incarnation", &Endpoint::incarnation)
      .def("stop", &Endpoint::Stop, nb::call_guard<nb::gil_scoped_release>())
      .def(
          "expose",
          [](Endpoint& self, nb::bytes key, int64_t version, nb::bytes manifest,
             const std::vector<ArrayArgument>& arrays, bool ready, bool once, const std::string& reader, double lease_s,
             uint64_t generations, std::vector<std::pair<int64_t, int64_t>> expected) {
            Exposure exposure;
            exposure.key.assign(key.c_str(), key.size());
            exposure.version = version;
            exposure.manifest.assign(manifest.c_str(), manifest.size());
            exposure.arrays = ArraysOf(arrays);
            exposure.ready.assign(arrays.size(), ready);
            exposure.reader = reader;
            exposure.once = once;
            if (once) exposure.expires = Source::Clock::now() + DurationOf(lease_s);
            exposure.generations = reinterpret_cast<const int64_t*>(generations);
            exposure.expected = std::move(expected);
            uint64_t id = 0;
            const Error error = self.Expose(std::move(exposure), &id);
            return std::make_tuple(static_cast<int32_t>(error.code), error.text, id);
          },
          nb::arg("key"), nb::arg("version"), nb::arg("manifest"), nb::arg("arrays"), nb::arg("ready"),
          nb::arg("once") = false, nb::arg("reader") = "", nb::arg("lease_s") = 0.0, nb::arg("generations") = 0,
          nb::arg("expected") = std::vector<std::pair<int64_t, int64_t>>(),
          "Shows arrays to readers. The caller keeps their memory until in_use() is false. Returns (code, text, id).")
      .def("withdraw", &Endpoint::Withdraw, nb::arg("id"), nb::arg("revoke"), nb::call_guard<nb::gil_scoped_release>())
      .def("in_use", &Endpoint::InUse, nb::arg("id"), nb::call_guard<nb::gil_scoped_release>())
      .def("mark_ready", &Endpoint::MarkReady, nb::arg("id"), nb::arg("array"),
           nb::call_guard<nb::gil_scoped_release>())
      .def(
          "connect", [](Endpoint& self, const std::string& address) { return ValueOrRaise(self.Connect(address)); },
          nb::arg("address"), "Returns the number of the connection. Calls wait for the proof.")
      .def("disconnect", &Endpoint::Disconnect, nb::arg("peer"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "open",
          [](Endpoint& self, int peer, nb::bytes key, int64_t version, int64_t lease_ms) {
            return self.Open(peer, std::string(key.c_str(), key.size()), version, lease_ms);
          },
          nb::arg("peer"), nb::arg("key"), nb::arg("version"), nb::arg("lease_ms"))
      .def(
          "open_and_read",
          [](Endpoint& self, int peer, nb::bytes key, int64_t version, int64_t lease_ms, nb::bytes digest, bool closes,
             const std::vector<PieceArgument>& from, const std::vector<PieceArgument>& to,
             const std::vector<ArrayArgument>& arrays) {
            const std::shared_ptr<Call> open = self.OpenAndRead(peer, std::string(key.c_str(), key.size()), version,
                                                                lease_ms, std::string(digest.c_str(), digest.size()),
                                                                closes, PiecesOf(from), PiecesOf(to), ArraysOf(arrays));
            return std::make_pair(open, open->read);
          },
          nb::arg("peer"), nb::arg("key"), nb::arg("version"), nb::arg("lease_ms"), nb::arg("digest"),
          nb::arg("closes"), nb::arg("from_"), nb::arg("to"), nb::arg("arrays"),
          "An open, and a read that begins with it if the manifest has this SHA-256; else it ends as cancelled. "
          "closes: the lease ends with the read.")
      .def(
          "watch",
          [](Endpoint& self, int peer, nb::bytes key, int64_t after) {
            return self.Watch(peer, std::string(key.c_str(), key.size()), after);
          },
          nb::arg("peer"), nb::arg("key"), nb::arg("after"))
      .def(
          "read",
          [](Endpoint& self, const std::vector<std::vector<SourceArgument>>& arguments,
             const std::vector<ArrayArgument>& arrays) {
            std::vector<std::vector<ReadSource>> reads;
            for (const std::vector<SourceArgument>& of_read : arguments) {
              std::vector<ReadSource>& sources = reads.emplace_back();
              for (const auto& [peer, lease, from, to] : of_read) {
                sources.push_back({peer, lease, PiecesOf(from), PiecesOf(to)});
              }
            }
            const nb::gil_scoped_release release;
            return self.Read(std::move(reads), ArraysOf(arrays));
          },
          nb::arg("sources"), nb::arg("arrays"),
          "Reads boxes of sources into boxes of own arrays, whose memory the caller keeps until the calls are done. "
          "Each source: connection, lease, boxes there, boxes here. The next one of a read is for when one is lost.")
      .def(
          "wait",
          [](Endpoint& self, const std::shared_ptr<Call>& call, double left_s, double timeout_s) {
            const auto began = std::chrono::steady_clock::now();
            for (double rest_s = left_s;; rest_s = left_s - SecondsSince(began)) {
              const bool done = [&] {
                const nb::gil_scoped_release release;
                return self.Wait(call, std::clamp(rest_s, 0.0, kSignalsEveryS));
              }();
              if (done) return ResultOf(self.ErrorOf(call));
              if (PyErr_CheckSignals() != 0) throw nb::python_error();
              if (SecondsSince(began) < left_s) continue;
              std::ostringstream text;
              text << "no answer within " << timeout_s << " s (timeout_s)";
              self.Cancel(call, {Code::kTimeout, text.str()});
            }
          },
          nb::arg("call"), nb::arg("left_s"), nb::arg("timeout_s"),
          "Waits for a call for what is left of timeout_s. Returns (code, text).")
      .def("poll", &Endpoint::Wait, nb::arg("call"), nb::arg("limit_s"), nb::call_guard<nb::gil_scoped_release>(),
           "Waits for a call, which goes on after the limit. Returns whether it is done.")
      .def("progress", &Endpoint::Progress, nb::arg("call"), nb::call_guard<nb::gil_scoped_release>())
      .def(
          "cancel",
          [](Endpoint& self, const std::shared_ptr<Call>& call) {
            self.Cancel(call, {Code::kCancelled, "this endpoint cancelled it"});
          },
          nb::arg("call"), nb::call_guard<nb::gil_scoped_release>())
      .def("close", &Endpoint::Close, nb::arg("peer"), nb::arg("lease"), nb::call_guard<nb::gil_scoped_release>())
      .def("stats", [](Endpoint& self) { return StatsOf(self.stats()); })
      .def("traffic",
           [](Endpoint& self) {
             std::map<std::string, std::map<std::string, uint64_t>> by_peer;
             for (const auto& [peer, traffic] : self.stats().traffic) by_peer[peer] = NamedTraffic(traffic);
             return by_peer;
           })
      .def(
          "histograms",
          [](Endpoint& self) {
            const EndpointStats stats = self.stats();
            const auto list = [](const Histogram& from) {
              return std::vector<uint64_t>(from.counts().begin(), from.counts().end());
            };
            return std::map<std::string, std::vector<uint64_t>>{{"open", list(stats.opens)},
                                                                {"read", list(stats.reads)}};
          },
          "Calls by time: element i counts those of less than 2^i microseconds that are in no element before.")
      .def(
          "waiting",
          [](Endpoint& self) {
            nb::list calls;
            for (const WaitingCall& call : self.Waiting()) {
              const char* what = call.answer == kOpenedFrame ? "open" : call.answer == kEndFrame ? "read" : "watch";
              calls.append(nb::make_tuple(call.peer, what, nb::bytes(call.key.data(), call.key.size()), call.version,
                                          call.seconds, call.received_bytes, call.total_bytes));
            }
            return calls;
          },
          "Calls without an answer yet: connection, what, key, version, seconds, bytes received, bytes in all.");
  m.def(
      "start",
      [](const std::string& name, nb::bytes secret, const std::string& host, const std::string& port,
         bool shared_memory, int64_t max_lease_ms, int max_strangers) {
        TcpNetwork::Options options;
        options.name = name;
        options.secret.assign(secret.c_str(), secret.size());
        options.host = host;
        options.port = port;
        options.shared_memory = shared_memory;
        options.max_strangers = max_strangers;
        options.max_silence_ms = max_lease_ms;
        return ValueOrRaise(Endpoint::Start(options, max_lease_ms));
      },
      nb::arg("name"), nb::arg("secret"), nb::arg("host"), nb::arg("port"), nb::arg("shared_memory"),
      nb::arg("max_lease_ms"), nb::arg("max_strangers"));
  m.def(
      "allocate",
      [](size_t bytes) {
        using Block = std::pair<char*, size_t>;
        char* const data = MemoryPool::Get().Take(bytes);
        if (data == nullptr) throw std::bad_alloc();
        const nb::capsule owner(new Block(data, bytes), [](void* owned) noexcept {
          const std::unique_ptr<Block> block(static_cast<Block*>(owned));
          MemoryPool::Get().Give(block->first, block->second);
        });
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {bytes}, owner);
      },
      nb::arg("bytes"), "Memory for an array of this process, with any content. It is used again once nobody has it.");
  m.def(
      "add_pull",
      [](std::shared_ptr<Endpoint> endpoint, std::vector<std::vector<std::shared_ptr<Call>>> layers,
         const std::vector<ArrayArgument>& arrays) {
        return CachePages::Get().AddPull(std::move(endpoint), std::move(layers), ArraysOf(arrays));
      },
      nb::arg("endpoint"), nb::arg("layers"), nb::arg("arrays"), "Lets programs insert what a pull has read.");
  m.def(
      "add_offer",
      [](std::shared_ptr<Endpoint> endpoint, uint64_t exposure, const std::vector<ArrayArgument>& arrays) {
        return CachePages::Get().AddOffer(std::move(endpoint), exposure, ArraysOf(arrays));
      },
      nb::arg("endpoint"), nb::arg("exposure"), nb::arg("arrays"), "Lets programs write the pages of an offer.");
  m.def(
      "remove", [](int32_t id) { CachePages::Get().Remove(id); }, nb::arg("id"),
      nb::call_guard<nb::gil_scoped_release>(), "Programs read and write these pages no more.");
  m.def(
      "moves",
      [](const std::vector<std::pair<Numbers, Numbers>>& sources,
         const std::vector<std::pair<Numbers, Numbers>>& destinations) {
        const auto boxes = [](const std::vector<std::pair<Numbers, Numbers>>& numbers) {
          std::vector<Box> made;
          for (const auto& [begin, end] : numbers) made.push_back({begin, end});
          return made;
        };
        std::vector<std::tuple<int32_t, int32_t, Numbers, Numbers>> found;
        for (const TransferMove& move : ValueOrRaise(TransferMoves(boxes(sources), boxes(destinations)))) {
          found.emplace_back(move.from, move.to, move.box.begin, move.box.end);
        }
        return found;
      },
      nb::arg("sources"), nb::arg("destinations"),
      "Which source sends which box of an array to which destination: each element once, the load spread over its "
      "owners.");
}

}  // namespace jaxcomm
