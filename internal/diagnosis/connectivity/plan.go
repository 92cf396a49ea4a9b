package connectivity

import (
	"fmt"
	"net/netip"
	"strings"
)

// Expect is what must happen to the questions of an Ask.
type Expect string

// The expectations.
const (
	Answer  Expect = "answer"  // a server of the list answers each question
	Spread  Expect = "spread"  // and each server of the list answers some question
	Sticky  Expect = "sticky"  // one server of the list answers all questions
	Refused Expect = "refused" // the connection is refused, at once
	Dropped Expect = "dropped" // no answer comes
)

// mtuSize is the Ask.Size of a datagram that fills a packet of the client's device.
const mtuSize = -1

// Ask is a question that a client asks several times.
type Ask struct {
	Case    string         `json:"case"`  // the row of the table
	Proto   string         `json:"proto"` // tcp or udp
	To      netip.AddrPort `json:"to"`
	Expect  Expect         `json:"expect"`
	Servers []string       `json:"servers,omitempty"`
	// Size is the length of the question in bytes, or mtuSize; 0 is short. The answer is not
	// longer.
	Size int `json:"size,omitempty"`
	// Unconnected sends UDP through a socket that does not connect, as DNS resolvers do.
	Unconnected bool `json:"unconnected,omitempty"`
	// Patient waits longer for the first correct answer: the Service changes once the client
	// runs.
	Patient bool `json:"patient,omitempty"`
}

// String describes the question, such as "udp 10.96.0.10:80".
func (a Ask) String() string {
	text := a.Proto + " " + a.To.String()
	switch {
	case a.Unconnected:
		text += ", unconnected socket"
	case a.Size == mtuSize:
		text += ", a full packet"
	case a.Size > 0:
		text += fmt.Sprintf(", %d bytes", a.Size)
	}
	return text
}

// want describes the expectation, in the words of outcome.
func (a Ask) want() string {
	switch a.Expect {
	case Answer:
		return "answer of " + strings.Join(a.Servers, " or ")
	case Spread:
		return "answers of all servers"
	case Sticky:
		return "answers of one server"
	case Refused:
		return "refused"
	default:
		return "no answer"
	}
}

// Plan is the work of one client.
type Plan struct {
	// Serve is the name with which the client answers on Port, for the case of a Pod that is
	// its own endpoint; "" does not answer.
	Serve string `json:"serve,omitempty"`
	Asks  []Ask  `json:"asks"`
}

// Result is the outcome of one Ask: a line of a client's log.
type Result struct {
	Ask int    `json:"ask"`           // index in the plan
	Got string `json:"got,omitempty"` // the difference; "" is as expected
}

// Port is the port on which servers listen, for TCP and UDP.
const Port = 8080

// servicePort is the port of all Services.
const servicePort = 80
