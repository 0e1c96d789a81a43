#include "transfer/reader.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "cpu/copy.h"

namespace jaxcomm {
namespace {

// Reads that no cache of a core holds bypass it. The slots of shared memory stay there.
constexpr int64_t kStreamedReadBytes = 4 << 20;

}  // namespace

std::shared_ptr<Call> Reader::Begin(int peer, FrameKind answer, const std::string& key, int64_t version, bool counts) {
  auto call = std::make_shared<Call>();
  call->peer = peer;
  call->answer = answer;
  call->key = key;
  call->version = version;
  call->id = next_id_++;
  calls_[call->id] = call;
  const auto to = peers_.find(peer);
  call->retry = to == peers_.end() || to->second.open || !to->second.lost.empty();
  if (to == peers_.end()) {  // another thread has found it lost, and has dropped it
    Finish(*call, {Code::kLost, "the connection has ended"}, counts);
  } else if (!to->second.lost.empty()) {
    Finish(*call, {Code::kLost, to->second.lost}, counts);
  }
  return call;
}

void Reader::Send(int peer, const Frame& frame, const std::string& payload) {
  const auto to = peers_.find(peer);
  if (to == peers_.end() || !to->second.lost.empty()) return;
  if (to->second.open) {
    network_->Send(peer, frame, payload.data());
  } else {
    to->second.waiting.emplace_back(frame, payload);
  }
}

void Reader::OnPeer(int peer) {
  peers_[peer].open = true;
  for (const auto& [frame, payload] : std::exchange(peers_[peer].waiting, {})) {
    network_->Send(peer, frame, payload.data());
  }
}

std::shared_ptr<Call> Reader::Open(int peer, const std::string& key, int64_t version, int64_t lease_ms) {
  std::shared_ptr<Call> call = Begin(peer, kOpenedFrame, key, version);
  Encoder request;
  request.PutText(key);
  request.Put(version);
  request.Put(lease_ms);
  request.PutText("");
  Send(peer, {kOpenFrame, static_cast<uint32_t>(request.bytes().size()), call->id, 0}, request.bytes());
  return call;
}

std::shared_ptr<Call> Reader::OpenAndRead(int peer, const std::string& key, int64_t version, int64_t lease_ms,
                                          const std::string& digest, bool closes, const std::vector<Piece>& from,
                                          std::vector<Piece> to, std::vector<StridedArray> arrays) {
  std::shared_ptr<Call> open = Begin(peer, kOpenedFrame, key, version);
  open->read = Begin(peer, kEndFrame, key, version, false);  // the open counts
  open->read->closes = closes;
  Encoder request;
  request.PutText(key);
  request.Put(version);
  request.Put(lease_ms);
  request.PutText(digest);
  request.Put(open->read->id);
  request.Put(static_cast<uint8_t>(closes));
  open->read->arrays = std::move(arrays);
  PutRead(*open->read, from, std::move(to), &request);
  if (open->read->done) {
    Finish(*open, open->read->error, false);  // the read counts
  } else {
    Send(peer, {kOpenFrame, static_cast<uint32_t>(request.bytes().size()), open->id, 0}, request.bytes());
  }
  return open;
}

std::shared_ptr<Call> Reader::Watch(int peer, const std::string& key, int64_t after) {
  std::shared_ptr<Call> call = Begin(peer, kNoticeFrame, key, kLatest);
  Encoder request;
  request.PutText(key);
  Send(peer, {kWatchFrame, static_cast<uint32_t>(request.bytes().size()), call->id, static_cast<uint64_t>(after)},
       request.bytes());
  return call;
}

void Reader::PutRead(Call& call, const std::vector<Piece>& from, std::vector<Piece> to, Encoder* request) {
  call.walk = PieceWalk(std::move(to));
  call.received_bytes = call.total_bytes = 0;
  for (const Piece& piece : call.walk.pieces()) {
    const StatusOr<int64_t> bytes = BytesOf(call.arrays[piece.array], piece.box);
    if (!bytes.ok()) return Finish(call, {Code::kInvalid, bytes.status().message()});
    call.total_bytes += *bytes;
  }
  request->Put(static_cast<uint32_t>(from.size()));
  for (const Piece& piece : from) {
    request->Put(piece.array);
    request->Put(static_cast<uint32_t>(piece.box.begin.size()));
    for (size_t d = 0; d < piece.box.begin.size(); ++d) {
      request->Put(piece.box.begin[d]);
      request->Put(piece.box.end[d]);
    }
  }
  if (request->bytes().size() > kMaxControlBytes) {
    Finish(call, {Code::kInvalid, "a read of " + std::to_string(from.size()) + " boxes: use several reads"});
  }
}

std::shared_ptr<Call> Reader::Read(std::vector<ReadSource> sources, std::vector<StridedArray> arrays) {
  auto first = std::find_if(sources.begin(), sources.end(),
                            [&](const ReadSource& each) { return leases_.count({each.peer, each.lease}) != 0; });
  if (first == sources.end()) first = sources.begin();
  const auto held = leases_.find({first->peer, first->lease});
  const bool ended = held == leases_.end();
  std::shared_ptr<Call> call =
      Begin(first->peer, kEndFrame, ended ? "" : held->second.key, ended ? kLatest : held->second.version);
  call->arrays = std::move(arrays);
  call->others.assign(std::make_move_iterator(first + 1), std::make_move_iterator(sources.end()));
  SendRead(*call, std::move(*first));
  return call;
}

void Reader::SendRead(Call& call, ReadSource source) {
  call.peer = source.peer;
  Encoder request;
  PutRead(call, source.from, std::move(source.to), &request);
  if (call.done) return;
  Send(call.peer, {kReadFrame, static_cast<uint32_t>(request.bytes().size()), call.id, source.lease}, request.bytes());
}

bool Reader::GoOn(Call& call) {
  while (!call.others.empty()) {
    ReadSource next = std::move(call.others.front());
    call.others.erase(call.others.begin());
    if (leases_.count({next.peer, next.lease}) == 0) continue;
    SendRead(call, std::move(next));
    return true;
  }
  return false;
}

void Reader::Finish(Call& call, Error error, bool counts) {
  if (call.done) return;
  const std::shared_ptr<Call> keep = calls_[call.id];
  calls_.erase(call.id);
  if (call.placing) network_->StopPlacing(call.peer);
  call.placing = false;
  call.error = std::move(error);
  call.done = true;
  if (!call.error.ok()) {
    failures_[call.error.code] += counts ? 1 : 0;
  } else if (call.answer != kNoticeFrame) {
    const auto now = Clock::now();
    (call.answer == kOpenedFrame ? opens_ : reads_).Add(now - call.began);
    if (call.answer == kEndFrame) {
      if (call.total_bytes == 0) call.first = call.last = now;
      stages_.wait += call.first - call.began;
      stages_.wire += call.last - call.first - call.place;
      stages_.place += call.place;
      stages_.commit += now - call.last;
    }
  }
  if (call.closes && call.error.ok()) {
    leases_.erase({call.peer, call.lease});  // as at the source
  } else if (call.closes) {
    Close(call.peer, call.lease);
  }
  if (!call.then.empty()) due_.push_back(keep);
  if (call.read != nullptr && !call.error.ok()) Finish(*call.read, call.error, false);
}

void Reader::Cancel(const std::shared_ptr<Call>& call, const Error& why) {
  if (call->done) return;
  Send(call->peer, {kCancelFrame, 0, call->id, 0}, "");
  Finish(*call, why);
}

void Reader::Close(int peer, uint64_t lease) {
  if (leases_.erase({peer, lease}) != 0) Send(peer, {kCloseFrame, 0, 0, lease}, "");
}

char* Reader::OnBulk(int peer, const Frame& frame) {
  const auto found = calls_.find(frame.id);
  if (found == calls_.end()) return nullptr;
  Call& call = *found->second;
  if (frame.kind != kDataFrame || call.peer != peer || frame.at != static_cast<uint64_t>(call.received_bytes) ||
      frame.bytes > call.total_bytes - call.received_bytes || frame.bytes == 0) {
    return nullptr;
  }
  Walk& rest = call.walk.Rest(call.arrays);
  if (rest.contiguous() < frame.bytes) return nullptr;
  int64_t bytes = 0;
  call.placing = true;
  return rest.Next(frame.bytes, &bytes);
}

void Reader::OnOpened(Call& call, const Frame& frame, const char* payload) {
  Decoder decoder(payload, frame.bytes);
  int64_t lease_ms = 0;
  uint8_t reads = 0;
  if (!decoder.Get(&call.version) || !decoder.Get(&lease_ms) || !decoder.Get(&reads) ||
      !decoder.GetText(&call.manifest) || lease_ms <= 0 || (reads != 0 && call.read == nullptr)) {
    return network_->Drop(call.peer, "it sent a malformed answer");
  }
  call.lease = frame.at;
  const std::chrono::milliseconds length(lease_ms);
  leases_[{call.peer, call.lease}] = {call.key, call.version, length, Clock::now() + length / 3};
  if (call.read != nullptr) call.read->version = call.version;
  if (call.read != nullptr && call.read->closes) call.read->lease = call.lease;
  if (call.read != nullptr && reads == 0) {
    Finish(*call.read, {Code::kCancelled, "the manifest has another digest"}, false);
  }
  Finish(call, {});
}

void Reader::OnFrame(int peer, const Frame& frame, const char* payload) {
  const auto found = calls_.find(frame.id);
  if (found == calls_.end() || found->second->peer != peer) {
    // The answer of a call that was cancelled. A lease that nobody waits for ends at once.
    if (frame.kind == kOpenedFrame) Send(peer, {kCloseFrame, 0, 0, frame.at}, "");
    return;
  }
  Call& call = *found->second;
  const bool data = frame.kind == kDataFrame && call.answer == kEndFrame;
  const bool refused = frame.kind == kRefusedFrame && frame.at > static_cast<uint64_t>(Code::kOk) &&
                       frame.at <= static_cast<uint64_t>(Code::kCancelled);
  if (frame.kind != call.answer && !data && !refused) return network_->Drop(peer, "it sent an answer of another kind");
  switch (frame.kind) {
    case kOpenedFrame:
      return OnOpened(call, frame, payload);
    case kNoticeFrame:
      call.version = static_cast<int64_t>(frame.at);
      return Finish(call, {});
    case kRefusedFrame:
      return Finish(call, {static_cast<Code>(frame.at), std::string(payload, frame.bytes)});
    case kEndFrame:
      if (call.received_bytes == call.total_bytes) return Finish(call, {});
      return network_->Drop(peer, "it sent other bytes than asked for");
    default:
      break;
  }
  if (frame.at != static_cast<uint64_t>(call.received_bytes) || frame.bytes > call.total_bytes - call.received_bytes) {
    return network_->Drop(peer, "it sent other bytes than asked for");
  }
  const auto now = Clock::now();
  if (call.received_bytes == 0) call.first = now, call.place = {};
  call.last = now;
  call.placing = false;
  call.received_bytes += frame.bytes;
  if (payload == nullptr) return;  // they are in place
  for (int64_t left = frame.bytes; left > 0;) {
    int64_t bytes = 0;
    char* to = call.walk.Rest(call.arrays).Next(left, &bytes);
    CopyBytes(to, payload, bytes, call.total_bytes >= kStreamedReadBytes);
    payload += bytes;
    left -= bytes;
  }
  call.last = Clock::now();
  call.place += call.last - now;
}

void Reader::OnLost(int peer, const std::string& why) {
  if (const auto found = peers_.find(peer); found != peers_.end()) found->second.lost = why;
  EraseLeases(peer);
  std::vector<std::shared_ptr<Call>> lost;
  for (const auto& [id, call] : calls_) {
    if (call->peer == peer) lost.push_back(call);
  }
  for (const auto& call : lost) {
    call->placing = false;  // the network has forgotten the connection
    if (!GoOn(*call)) Finish(*call, {Code::kLost, why});
  }
}

std::vector<WaitingCall> Reader::Waiting() const {
  const auto now = Clock::now();
  std::vector<WaitingCall> waiting;
  for (const auto& [id, call] : calls_) {
    const std::chrono::duration<double> seconds = now - call->began;
    waiting.push_back(
        {call->peer, call->answer, call->key, call->version, seconds.count(), call->received_bytes, call->total_bytes});
  }
  return waiting;
}

void Reader::EndAll(const Error& why) {
  while (!calls_.empty()) Finish(*calls_.begin()->second, why);
}

void Reader::OnTime(Clock::time_point now) {
  std::vector<std::shared_ptr<Call>> late;
  for (const auto& [id, call] : calls_) {
    if (now >= call->deadline) late.push_back(call);
  }
  for (const auto& call : late) Cancel(call, {Code::kTimeout, "no answer within the limit of the program"});
  for (auto& [key, lease] : leases_) {
    if (now < lease.renew) continue;
    lease.renew = now + lease.length / 3;
    Send(key.first, {kRenewFrame, 0, 0, key.second}, "");
  }
}

}  // namespace jaxcomm
