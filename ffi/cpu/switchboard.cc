#include "switchboard.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <utility>

namespace jaxcomm {
namespace {

constexpr size_t kMaxClosed = 1 << 14;
constexpr size_t kMaxGivenUp = 1 << 10;

}  // namespace

void Switchboard::Register(uint64_t key, std::shared_ptr<Line> line) {
  Waiting waiting;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lines_[key] = line;
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    waiting = std::move(found->second);
    waiting_.erase(found);
  }
  // While puts wait, nothing after them in their channel is delivered: events came before, so their order is kept.
  for (const WaitingEvent& waited : waiting.events) waited.event(*line);
  for (const WaitingPut& put : waiting.puts) {
    network_->Accept(put.process, put.id, GivePlace(put.process, put.id, put.header, put.bytes, line));
  }
}

void* Switchboard::GivePlace(int process, uint64_t id, const Header& header, int64_t bytes,
                             const std::shared_ptr<Line>& line) {
  void* const place = line->PlaceOf(header.fingerprint, header.to, header.space, header.offset_bytes, bytes);
  if (place != nullptr) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (lost_.count(process) == 0) {
      landing_[{process, id}] = line;
      return place;
    }
    lock.unlock();
    line->OnLanded();
  }
  return nullptr;
}

void Switchboard::Abandon(const Line& line) {
  std::set<int> processes;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [id, of] : landing_) {
      if (of.get() == &line) processes.insert(id.first);
    }
  }
  for (const int process : processes) network_->Drop(process, "its data did not arrive in time");
}

void Switchboard::Unregister(uint64_t key) {
  std::lock_guard<std::mutex> lock(mutex_);
  lines_.erase(key);
  if (closed_.insert(key).second) closed_order_.push_back(key);
  if (closed_order_.size() > kMaxClosed) {
    closed_.erase(closed_order_.front());
    closed_order_.pop_front();
  }
}

void Switchboard::Send(int32_t process, const Header& header, std::unique_ptr<char[]> data, int64_t bytes) {
  const char* payload = data.get();
  // Messages about a whole call must not wait behind payloads that the receiver may never ask for. Keys are odd.
  const bool aside = header.kind == Kind::kEntered || header.kind == Kind::kGivenUp;
  network_->Send(process, aside ? header.key ^ 1 : header.key, &header, sizeof(header), payload,
                 static_cast<size_t>(bytes), [owned = std::shared_ptr<char[]>(std::move(data))](bool) {});
}

Switchboard::Header Switchboard::HeaderOf(Kind kind, uint64_t key, uint64_t fingerprint) {
  Header header;
  header.kind = kind;
  header.key = key;
  header.fingerprint = fingerprint;
  return header;
}

void Switchboard::Put(int32_t process, uint64_t key, uint64_t fingerprint, const Place& to, int64_t offset_bytes,
                      std::unique_ptr<char[]> data, int64_t bytes) {
  Header header = HeaderOf(Kind::kPut, key, fingerprint);
  header.to = to.rank;
  header.space = to.space;
  header.offset_bytes = offset_bytes;
  Send(process, header, std::move(data), bytes);
}

void Switchboard::Signal(int32_t process, uint64_t key, int32_t from, int32_t to) {
  Header header = HeaderOf(Kind::kSignal, key);
  header.from = from;
  header.to = to;
  Send(process, header, nullptr, 0);
}

void Switchboard::SendText(int32_t process, const Header& header, const std::string& text) {
  std::unique_ptr<char[]> data(new char[text.size()]);
  std::memcpy(data.get(), text.data(), text.size());
  Send(process, header, std::move(data), static_cast<int64_t>(text.size()));
}

void Switchboard::SayEntered(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what) {
  SendText(process, HeaderOf(Kind::kEntered, key, fingerprint), what);
}

void Switchboard::SayLeft(int32_t process, uint64_t key, uint64_t fingerprint, const std::string& what) {
  SendText(process, HeaderOf(Kind::kLeft, key, fingerprint), what);
}

void Switchboard::SayGivenUp(int32_t process, uint64_t key, const std::string& why) {
  SendText(process, HeaderOf(Kind::kGivenUp, key), why);
}

Status Switchboard::Reachable(int32_t process) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lost_.find(process);
  return found == lost_.end() ? OkStatus() : UnavailableError(found->second);
}

std::string Switchboard::Elsewhere(int32_t process) {
  std::lock_guard<std::mutex> lock(mutex_);
  std::string text;
  for (const auto& [key, waiting] : waiting_) {
    const auto found = waiting.entered.find(process);
    if (found == waiting.entered.end()) continue;
    text += (text.empty() ? " in " : " and in ") + found->second;
    if (text.size() > 600) break;
  }
  return text;
}

void* Switchboard::PlaceOfText(const Message& message) {
  auto& place = texts_[{message.process, message.id}];
  place.reset(new char[std::max<size_t>(message.bytes, 1)]);
  return place.get();
}

// Nobody waits for the payload, nor shall what follows it in its channel: a large one is not even fetched.
void* Switchboard::Refuse(const Message& message) {
  network_->Accept(message.process, message.id, nullptr);
  return nullptr;
}

void* Switchboard::OnMessage(const Message& message) {
  Header header;
  if (message.header_bytes != sizeof(header)) return Refuse(message);
  std::memcpy(&header, message.header, sizeof(header));
  if (header.kind != Kind::kPut) return PlaceOfText(message);
  std::shared_ptr<Line> line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(header.key) > 0) return Refuse(message);
    const auto found = lines_.find(header.key);
    if (found == lines_.end()) {
      Waiting& waiting = waiting_[header.key];
      if (waiting.given_up.count(message.process) > 0) return Refuse(message);
      waiting.puts.push_back({message.process, message.id, header, static_cast<int64_t>(message.bytes)});
      return nullptr;
    }
    line = found->second;
  }
  void* const place = GivePlace(message.process, message.id, header, static_cast<int64_t>(message.bytes), line);
  return place != nullptr ? place : Refuse(message);
}

void Switchboard::Land(const MessageId& id) {
  std::shared_ptr<Line> line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto found = landing_.find(id);
    if (found == landing_.end()) return;
    line = std::move(found->second);
    landing_.erase(found);
  }
  line->OnLanded();
}

// The process has given up a call that this one has not entered. If it ever does, it learns so.
void Switchboard::DropWaiting(uint64_t key, int32_t process) {
  std::vector<WaitingPut> dropped;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    const auto drop = [&](Waiting& waiting, bool all) {
      const auto kept = std::partition(waiting.puts.begin(), waiting.puts.end(),
                                       [&](const WaitingPut& put) { return !all && put.process != process; });
      dropped.insert(dropped.end(), kept, waiting.puts.end());
      waiting.puts.erase(kept, waiting.puts.end());
    };
    const auto found = waiting_.find(key);
    if (found == waiting_.end()) return;
    drop(found->second, false);
    found->second.given_up.insert(process);
    given_up_.push_back(key);
    if (given_up_.size() > kMaxGivenUp) {
      const auto oldest = waiting_.find(given_up_.front());
      given_up_.pop_front();
      if (oldest != waiting_.end()) {
        drop(oldest->second, true);
        waiting_.erase(oldest);
      }
    }
  }
  for (const WaitingPut& put : dropped) network_->Accept(put.process, put.id, nullptr);
}

void Switchboard::Tell(uint64_t key, WaitingEvent event, const std::function<void(Waiting&)>& note) {
  std::shared_ptr<Line> line;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    if (closed_.count(key) > 0) return;
    const auto found = lines_.find(key);
    if (found == lines_.end()) {
      Waiting& waiting = waiting_[key];
      waiting.events.push_back(std::move(event));
      if (note) note(waiting);
      return;
    }
    line = found->second;
  }
  event.event(*line);
}

void Switchboard::OnDelivered(const Message& message) {
  Header header;
  std::string text;
  const auto kept = texts_.find({message.process, message.id});
  if (kept != texts_.end()) {
    text.assign(kept->second.get(), message.bytes);
    texts_.erase(kept);
  }
  if (message.header_bytes != sizeof(header)) return;
  std::memcpy(&header, message.header, sizeof(header));
  const int32_t process = message.process;
  switch (header.kind) {
    case Kind::kPut:
      return Land({message.process, message.id});
    case Kind::kSignal:
      return Tell(header.key, {process, [=](Line& line) { line.OnSignal(header.from, header.to); }});
    case Kind::kEntered:
      return Tell(header.key, {process, [=](Line& line) { line.OnEntered(process, header.fingerprint, text); }},
                  [&](Waiting& waiting) { waiting.entered[process] = text; });
    case Kind::kLeft:
      return Tell(header.key, {process, [=](Line& line) { line.OnLeft(process, header.fingerprint, text); }});
    case Kind::kGivenUp:
      Tell(header.key, {process, [=](Line& line) { line.OnGivenUp(process, text); }},
           [&](Waiting& waiting) { waiting.entered.erase(process); });
      return DropWaiting(header.key, process);
  }
}

void Switchboard::OnPeerLost(int process, const std::string& why) {
  std::vector<std::shared_ptr<Line>> lines, landed;
  {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_[process] = why;
    for (const auto& entry : lines_) lines.push_back(entry.second);
    for (auto it = landing_.lower_bound({process, 0}); it != landing_.end() && it->first.first == process;) {
      landed.push_back(std::move(it->second));
      it = landing_.erase(it);
    }
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      Waiting& waiting = it->second;
      waiting.entered.erase(process);
      // Of no use: whoever enters the call learns of the loss.
      const auto of_lost = [&](const auto& item) { return item.process == process; };
      waiting.puts.erase(std::remove_if(waiting.puts.begin(), waiting.puts.end(), of_lost), waiting.puts.end());
      waiting.events.erase(std::remove_if(waiting.events.begin(), waiting.events.end(), of_lost), waiting.events.end());
      it = waiting.puts.empty() && waiting.events.empty() ? waiting_.erase(it) : std::next(it);
    }
  }
  for (const auto& line : landed) line->OnLanded();
  for (const auto& line : lines) line->OnLost(process);
}

}  // namespace jaxcomm
