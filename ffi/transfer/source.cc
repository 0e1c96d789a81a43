#include "transfer/source.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/sha256.h"

namespace jaxcomm {
namespace {

constexpr size_t kMaxPieces = 1 << 20;  // of one read
constexpr int64_t kLongRunBytes = 64 << 10;

Error CheckPages(const Exposure& exposure) {
  for (const auto& [page, generation] : exposure.expected) {
    if (__atomic_load_n(&exposure.generations[page], __ATOMIC_ACQUIRE) != generation) {
      return {Code::kRevoked, "cache page " + std::to_string(page) + " was used again"};
    }
  }
  return {};
}

}  // namespace

Error Source::Expose(Exposure exposure, uint64_t* id) {
  if (!exposure.once) {
    const auto newest = newest_.find(exposure.key);
    if (newest != newest_.end() && exposure.version <= newest->second) {
      return {Code::kInvalid, "version " + std::to_string(exposure.version) + " must be later than version " +
                                  std::to_string(newest->second) + ", the newest one"};
    }
    newest_[exposure.key] = exposure.version;
  } else if (versions_.count(exposure.key) != 0) {
    return {Code::kInvalid, "the ticket is in use"};
  }
  Sha256 digest;
  digest.Update(exposure.manifest.data(), exposure.manifest.size());
  const Digest bytes = digest.Finish();
  exposure.digest.assign(bytes.begin(), bytes.end());
  exposure.id = *id = next_id_++;
  const std::string key = exposure.key;
  versions_[key][exposure.version] = exposure.id;
  exposures_[exposure.id] = std::make_shared<Exposure>(std::move(exposure));
  Notify(key);
  return {};
}

const Exposure* Source::Find(uint64_t id) const {
  const auto found = exposures_.find(id);
  return found == exposures_.end() ? nullptr : found->second.get();
}

void Source::Withdraw(uint64_t id, bool revoke) {
  const auto found = exposures_.find(id);
  if (found == exposures_.end()) return;
  Exposure& exposure = *found->second;
  exposure.withdrawn = true;
  auto versions = versions_.find(exposure.key);
  if (versions != versions_.end()) {
    const auto own = versions->second.find(exposure.version);
    if (own != versions->second.end() && own->second == id) versions->second.erase(own);
    if (versions->second.empty()) versions_.erase(versions);
  }
  if (revoke && !exposure.revoked) {
    exposure.revoked = true;
    counters_.revoked += static_cast<uint64_t>(exposure.num_leases);
    for (auto& [peer, reads] : reads_) network_->SetBusy(peer, true);  // they end with an error
  }
  Collect(id);
}

bool Source::InUse(uint64_t id) const {
  const Exposure* exposure = Find(id);
  return exposure != nullptr && !exposure->revoked;
}

void Source::MarkReady(uint64_t id, uint32_t array) {
  const auto found = exposures_.find(id);
  if (found == exposures_.end()) return;
  found->second->ready[array] = true;
  for (auto& [peer, reads] : reads_) {
    for (const Read& read : reads) {
      if (read.exposure->id == id) network_->SetBusy(peer, true);
    }
  }
}

// Forgets what nobody can open and nobody reads.
void Source::Collect(uint64_t id) {
  const auto found = exposures_.find(id);
  if (found != exposures_.end() && found->second->withdrawn && found->second->num_leases == 0) exposures_.erase(found);
}

void Source::EndLease(uint64_t id) {
  const auto lease = leases_.find(id);
  if (lease == leases_.end()) return;
  const std::shared_ptr<Exposure> exposure = lease->second.exposure;
  leases_.erase(lease);
  --exposure->num_leases;
  if (exposure->once) {
    Withdraw(exposure->id, false);
  } else {
    Collect(exposure->id);
  }
}

void Source::Refuse(int peer, uint64_t id, Code code, const std::string& text) {
  ++counters_.refused;
  const Frame frame = {kRefusedFrame, static_cast<uint32_t>(text.size()), id, static_cast<uint64_t>(code)};
  network_->Send(peer, frame, text.data());
}

int64_t Source::NewestOf(const std::string& key) const {
  const auto versions = versions_.find(key);
  return versions == versions_.end() ? kLatest : versions->second.rbegin()->first;
}

void Source::OnFrame(int peer, const Frame& frame, Decoder payload) {
  switch (frame.kind) {
    case kOpenFrame:
      return OnOpen(peer, frame, payload);
    case kReadFrame:
      return OnRead(peer, frame, payload);
    case kWatchFrame:
      return OnWatch(peer, frame, payload);
    case kCancelFrame:
      return OnCancel(peer, frame.id);
    case kRenewFrame:
    case kCloseFrame:
      break;
    default:
      return network_->Drop(peer, "it sent a frame of unknown kind " + std::to_string(frame.kind));
  }
  const auto lease = leases_.find(frame.at);
  if (lease == leases_.end() || lease->second.peer != peer) return;  // it has ended: both calls may come twice
  if (frame.kind == kCloseFrame) return EndLease(frame.at);
  lease->second.expires = Clock::now() + lease->second.length;
  ++counters_.renewed;
}

void Source::OnOpen(int peer, const Frame& frame, Decoder payload) {
  std::string key, digest;
  int64_t version = 0, lease_ms = 0;
  uint64_t read = 0;
  uint8_t closes = 0;
  if (!payload.GetText(&key) || !payload.Get(&version) || !payload.Get(&lease_ms) || !payload.GetText(&digest) ||
      lease_ms <= 0 || (digest.empty() ? !payload.done() : !payload.Get(&read) || !payload.Get(&closes))) {
    return network_->Drop(peer, "it sent a malformed request");
  }
  if (version == kLatest) version = NewestOf(key);
  const auto versions = versions_.find(key);
  if (versions == versions_.end() || versions->second.count(version) == 0) {
    const auto newest = newest_.find(key);
    if (newest == newest_.end()) return Refuse(peer, frame.id, Code::kUnknown, "it has no such object or ticket");
    if (version > newest->second) {
      return Refuse(peer, frame.id, Code::kUnknown,
                    "the newest version is " + std::to_string(newest->second) + " (watch() waits for later ones)");
    }
    return Refuse(peer, frame.id, Code::kGone, "the version was retired");
  }
  const std::shared_ptr<Exposure> exposure = exposures_[versions->second[version]];
  if (!exposure->reader.empty() && exposure->reader != network_->name_of(peer)) {
    return Refuse(peer, frame.id, Code::kInvalid, "the ticket is for '" + exposure->reader + "'");
  }
  if (exposure->once && exposure->used) return Refuse(peer, frame.id, Code::kGone, "the ticket was used before");
  exposure->used = true;
  ++exposure->num_leases;
  lease_ms = std::min(lease_ms, max_lease_ms_);
  const uint64_t id = next_id_++;
  leases_[id] = {peer, exposure, std::chrono::milliseconds(lease_ms),
                 Clock::now() + std::chrono::milliseconds(lease_ms)};
  ++counters_.granted;
  Encoder reply;
  reply.Put(version);
  reply.Put(lease_ms);
  const bool reads = digest == exposure->digest;
  reply.Put(static_cast<uint8_t>(reads));
  reply.PutText(reads ? "" : exposure->manifest);
  network_->Send(peer, {kOpenedFrame, static_cast<uint32_t>(reply.bytes().size()), frame.id, id}, reply.bytes().data());
  if (reads) StartRead(peer, read, id, closes != 0, payload);
}

void Source::OnRead(int peer, const Frame& frame, Decoder payload) {
  const auto lease = leases_.find(frame.at);
  if (lease == leases_.end() || lease->second.peer != peer) {
    return Refuse(peer, frame.id, Code::kRevoked, "the lease has ended");
  }
  StartRead(peer, frame.id, frame.at, false, payload);
}

void Source::StartRead(int peer, uint64_t id, uint64_t lease, bool closes, Decoder payload) {
  Read read{id, lease, closes, leases_[lease].exposure, {}, 0, 0};
  std::vector<Piece> pieces;
  uint32_t num_pieces = 0;
  bool whole = payload.Get(&num_pieces) && num_pieces <= kMaxPieces;
  for (uint32_t i = 0; whole && i < num_pieces; ++i) {
    Piece piece;
    uint32_t num_dimensions = 0;
    whole = payload.Get(&piece.array) && payload.Get(&num_dimensions) && num_dimensions <= kMaxDimensions;
    for (uint32_t d = 0; whole && d < num_dimensions; ++d) {
      whole = payload.Get(&piece.box.begin.emplace_back()) && payload.Get(&piece.box.end.emplace_back());
    }
    if (!whole) break;
    if (piece.array >= read.exposure->arrays.size()) {
      return Refuse(peer, id, Code::kInvalid, "there is no array " + std::to_string(piece.array));
    }
    const StatusOr<int64_t> bytes = BytesOf(read.exposure->arrays[piece.array], piece.box);
    if (!bytes.ok()) return Refuse(peer, id, Code::kInvalid, bytes.status().message());
    if (__builtin_add_overflow(read.total_bytes, *bytes, &read.total_bytes)) whole = false;
    pieces.push_back(std::move(piece));
  }
  if (!whole || !payload.done()) return network_->Drop(peer, "it sent a malformed request");
  read.walk = PieceWalk(std::move(pieces));
  ++counters_.reads;
  reads_[peer].push_back(std::move(read));
  network_->SetBusy(peer, true);
}

void Source::OnWatch(int peer, const Frame& frame, Decoder payload) {
  std::string key;
  if (!payload.GetText(&key) || !payload.done()) return network_->Drop(peer, "it sent a malformed request");
  watches_.emplace(key, Watch{peer, frame.id, static_cast<int64_t>(frame.at)});
  Notify(key);
}

void Source::Notify(const std::string& key) {
  const int64_t newest = NewestOf(key);
  const auto [first, last] = watches_.equal_range(key);
  for (auto at = first; at != last;) {
    if (newest > at->second.after) {
      network_->Send(at->second.peer, {kNoticeFrame, 0, at->second.id, static_cast<uint64_t>(newest)}, nullptr);
      at = watches_.erase(at);
    } else {
      ++at;
    }
  }
}

void Source::OnCancel(int peer, uint64_t id) {
  std::deque<Read>& reads = reads_[peer];
  reads.erase(std::remove_if(reads.begin(), reads.end(), [&](const Read& read) { return read.id == id; }), reads.end());
  for (auto at = watches_.begin(); at != watches_.end();) {
    at = at->second.peer == peer && at->second.id == id ? watches_.erase(at) : std::next(at);
  }
}

bool Source::IsReady(const Read& read) const {
  return std::all_of(read.walk.pieces().begin(), read.walk.pieces().end(),
                     [&](const Piece& piece) { return read.exposure->ready[piece.array]; });
}

Error Source::Check(const Read& read) const {
  if (read.exposure->revoked) return {Code::kRevoked, "the source took it back"};
  if (leases_.count(read.lease) == 0) return {Code::kRevoked, "the lease has ended"};
  return CheckPages(*read.exposure);
}

void Source::Pack(Read& read, char* to, int64_t bytes) {
  while (bytes > 0) {
    int64_t run = 0;
    const char* from = read.walk.Rest(read.exposure->arrays).Next(bytes, &run);
    std::memcpy(to, from, static_cast<size_t>(run));
    to += run;
    bytes -= run;
  }
}

void Source::OnRoom(int peer) {
  std::deque<Read>& reads = reads_[peer];
  const auto ready =
      std::find_if(reads.begin(), reads.end(), [&](const Read& read) { return IsReady(read) || !Check(read).ok(); });
  if (ready == reads.end()) return network_->SetBusy(peer, false);
  Read& read = *ready;
  Error error = Check(read);
  int64_t bytes = std::min<int64_t>(read.total_bytes - read.sent_bytes, kMaxBulkBytes);
  if (error.ok() && bytes > 0) {
    Walk& rest = read.walk.Rest(read.exposure->arrays);
    // A long run is a frame of its own: neither side packs it.
    if (rest.contiguous() >= std::min(bytes, kLongRunBytes)) bytes = std::min(bytes, rest.contiguous());
    const char* payload = rest.contiguous() >= bytes ? rest.Next(bytes, &bytes) : nullptr;
    network_->SendBulk(peer,
                       {kDataFrame, static_cast<uint32_t>(bytes), read.id, static_cast<uint64_t>(read.sent_bytes)},
                       payload, [&](char* to) { Pack(read, to, bytes); });
    read.sent_bytes += bytes;
    error = Check(read);  // pages may have changed while they were packed
  }
  if (error.ok() && read.sent_bytes < read.total_bytes) {
    // Leases take turns. Reads of one lease keep their order: a layer is wanted before the next one.
    std::stable_partition(reads.begin(), reads.end(),
                          [lease = read.lease](const Read& other) { return other.lease != lease; });
    return;
  }
  if (error.ok()) {
    network_->Send(peer, {kEndFrame, 0, read.id, static_cast<uint64_t>(read.total_bytes)}, nullptr);
    if (read.closes) EndLease(read.lease);
  } else {
    Refuse(peer, read.id, error.code, error.text);
  }
  reads.erase(ready);
}

void Source::OnLost(int peer) {
  reads_.erase(peer);
  for (auto at = watches_.begin(); at != watches_.end();) {
    at = at->second.peer == peer ? watches_.erase(at) : std::next(at);
  }
  std::vector<uint64_t> ended;
  for (const auto& [id, lease] : leases_) {
    if (lease.peer == peer) ended.push_back(id);
  }
  for (const uint64_t id : ended) EndLease(id);
}

void Source::OnTime(Clock::time_point now) {
  std::vector<uint64_t> ended;
  for (const auto& [id, lease] : leases_) {
    if (now >= lease.expires) ended.push_back(id);
  }
  for (const uint64_t id : ended) {
    ++counters_.expired;
    network_->SetBusy(leases_[id].peer, true);  // its reads end with an error
    EndLease(id);
  }
  std::vector<uint64_t> not_taken;
  for (const auto& [id, exposure] : exposures_) {
    if (exposure->once && !exposure->used && now >= exposure->expires) not_taken.push_back(id);
  }
  for (const uint64_t id : not_taken) {
    ++counters_.expired;
    Withdraw(id, false);
  }
}

}  // namespace jaxcomm
