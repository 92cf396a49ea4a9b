// Package probe is the process that a test runs inside a node, a pod or an
// outside client to send real traffic and to answer it. The test binary starts
// itself again (see Main) in the namespace and cgroup that the question is
// about, and drives the process with JSON lines over stdin and stdout.
//
// The client side uses plain sockets instead of package net, because the cases
// ask for what net hides: getpeername, the address recvfrom names, IPv6 sockets
// that talk to mapped IPv4 addresses, one unconnected socket for many sends.
package probe

import (
	"errors"

	"golang.org/x/sys/unix"
)

// Op is what a Request asks for.
type Op string

// The operations of a probe.
const (
	Try    Op = "try"    // ask a server, Tries times
	Serve  Op = "serve"  // answer on Listen until the process ends
	Stream Op = "stream" // start a stream of numbered questions
	Peek   Op = "peek"   // report on a stream that continues
	Stop   Op = "stop"   // end a stream and report on it
	Forget Op = "forget" // close the kept socket
)

// Request is one line to a probe.
type Request struct {
	ID    int    `json:"id"`
	Op    Op     `json:"op"`
	Proto string `json:"proto,omitempty"` // tcp, udp, http, new-tcp (streams: a new connection each time)
	Dst   string `json:"dst,omitempty"`   // address:port

	Tries     int `json:"tries,omitempty"`     // 0 is 1
	TimeoutMS int `json:"timeoutMs,omitempty"` // for each try; 0 is 3000
	PauseMS   int `json:"pauseMs,omitempty"`   // between tries, or between a stream's questions

	// LowPorts has the kernel choose local ports from the lower part of its
	// range, other requests get the upper part: two probes of one pod then never
	// use the same port.
	LowPorts bool `json:"lowPorts,omitempty"`
	// FreshPorts gives each socket a local port that no socket of the process had before.
	FreshPorts bool   `json:"freshPorts,omitempty"`
	LocalPort  int    `json:"localPort,omitempty"`
	Socket     string `json:"socket,omitempty"` // one socket of this name for all tries, kept for later requests
	// SameSocket sends all tries of this request through one socket.
	SameSocket  bool `json:"sameSocket,omitempty"`
	Unconnected bool `json:"unconnected,omitempty"` // UDP: sendto on a socket that never connects
	Mapped      bool `json:"mapped,omitempty"`      // an AF_INET6 socket towards ::ffff:a.b.c.d
	// Size is the length that blanks bring a question to, in bytes; its answer is
	// short all the same.
	Size int `json:"size,omitempty"`

	// Netexec asks agnhost's netexec for its Pod's name: over TCP by HTTP, over UDP by its
	// command.
	Netexec bool `json:"netexec,omitempty"`
	// Processes of servers, by their names: a stream asks again over a new connection if
	// one breaks after its server's process has ended, as HTTP clients do.
	Processes map[string]int `json:"processes,omitempty"`

	Server string   `json:"server,omitempty"` // Serve: the name to answer with
	Listen []string `json:"listen,omitempty"` // Serve: "tcp [::]:8080", ...
	Name   string   `json:"name,omitempty"`   // Stream, Peek and Stop: which stream
}

// Kind sorts what went wrong with one try.
type Kind string

// The kinds of failure; OK is none.
const (
	OK      Kind = ""
	Refused Kind = "refused" // RST to a SYN, or ICMP port unreachable
	Timeout Kind = "timeout"
	Reset   Kind = "reset"
	Unreach Kind = "unreach" // ICMP host or network unreachable, or no route here
	Denied  Kind = "denied"  // EPERM: a socket hook said no without a better errno
	Other   Kind = "other"
)

// Answer is the result of one try.
type Answer struct {
	Server string `json:"server,omitempty"` // the answering server; an HTTP status for http
	Source string `json:"source,omitempty"` // the client's address as the server saw it
	// Peer is the address the client believes it talks to: getpeername on a
	// connected socket.
	Peer string `json:"peer,omitempty"`
	// From is the address recvfrom named (UDP only).
	From   string `json:"from,omitempty"`
	Err    Kind   `json:"err,omitempty"`
	Detail string `json:"detail,omitempty"`
}

// Report is what a stream has seen.
type Report struct {
	Sent     int            `json:"sent"`
	Answered int            `json:"answered"`
	Servers  map[string]int `json:"servers,omitempty"`
	Lost     []string       `json:"lost,omitempty"` // the first few, with their reason
	// Ended counts the connections whose server ended.
	Ended int `json:"ended,omitempty"`
	// Late counts the answers that came after the timeout. SlowestMS is the
	// duration of the slowest answer.
	Late      int `json:"late,omitempty"`
	SlowestMS int `json:"slowestMs,omitempty"`
}

// Response is one line from a probe.
type Response struct {
	ID      int      `json:"id"`
	Answers []Answer `json:"answers,omitempty"`
	Report  *Report  `json:"report,omitempty"`
	Err     string   `json:"err,omitempty"` // the request itself could not be carried out
}

// errTimeout is the error of a deadline that passed.
var errTimeout = errors.New("deadline passed")

// kindOf sorts an error of a socket call.
func kindOf(err error) Kind {
	switch {
	case err == nil:
		return OK
	case errors.Is(err, errTimeout), errors.Is(err, unix.ETIMEDOUT):
		return Timeout
	case errors.Is(err, unix.ECONNREFUSED):
		return Refused
	case errors.Is(err, unix.ECONNRESET), errors.Is(err, unix.EPIPE):
		return Reset
	case errors.Is(err, unix.EHOSTUNREACH), errors.Is(err, unix.ENETUNREACH):
		return Unreach
	case errors.Is(err, unix.EPERM), errors.Is(err, unix.EACCES):
		return Denied
	}
	return Other
}
