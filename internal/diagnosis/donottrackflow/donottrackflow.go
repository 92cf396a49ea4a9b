// Package donottrackflow explains what do-not-track policies decide about a flow. It works
// from the objects of the cluster, and asks no agent.
package donottrackflow

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"spillway.dev/spillway/internal/decisions/donottrack"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/proxymode"
)

// Question asks about a flow. Its fields have the meaning of the flags of the command
// `spillway donottrack explain`.
type Question struct {
	From, To             string // a pod as NAMESPACE/NAME, node/NAME, or an address
	Port, SourcePort     int    // SourcePort 0: any
	Protocol             string // TCP, UDP or SCTP, in any case
	ProxyMode, ProxyName string // of the agents
}

// QuestionError is an error in the question itself.
type QuestionError struct{ msg string }

func (e *QuestionError) Error() string { return e.msg }

func questionErrorf(format string, args ...any) error {
	return &QuestionError{msg: fmt.Sprintf(format, args...)}
}

// Explanation is the answer to a Question.
type Explanation struct {
	From      string         `json:"from"`
	To        string         `json:"to"`
	Port      uint16         `json:"port"`
	Protocol  string         `json:"protocol"`
	Outcome   string         `json:"outcome"` // of all flows, or Differs
	Flows     []FlowOutcome  `json:"flows"`   // one for each pair of addresses
	Decisions []NodeDecision `json:"decisions"`
	Notes     []string       `json:"notes,omitempty"`    // assumptions
	Problems  []string       `json:"problems,omitempty"` // objects that could not be read
}

// FlowOutcome is the outcome for connections between two addresses.
type FlowOutcome struct {
	From    netip.Addr     `json:"from"`
	To      netip.AddrPort `json:"to"`
	Outcome string         `json:"outcome"`
}

// NodeDecision is the decision of one node.
type NodeDecision struct {
	Node string `json:"node"`
	Side string `json:"side"`
	donottrack.Decision
}

// Differs is the outcome if it is not the same for all addresses of client and server.
const Differs = "differs by address"

// NotJudged is the outcome if a Service or a CNI translates the destination, so that a
// policy of another server may decide.
const NotJudged = "not judged"

var flowProtocols = map[string]model.Protocol{"TCP": model.TCP, "UDP": model.UDP, "SCTP": model.SCTP}

// Validate returns a QuestionError if the question has no answer whatever the objects
// are. Its text uses the names of the command's flags.
func (q Question) Validate() error {
	_, known := flowProtocols[strings.ToUpper(q.Protocol)]
	switch {
	case q.From == "" || q.To == "":
		return questionErrorf("--from and --to are needed: a pod as NAMESPACE/NAME, node/NAME, or an address")
	case q.Port < 1 || q.Port > 65535:
		return questionErrorf("--port %d: give a port from 1 to 65535", q.Port)
	case q.SourcePort < 0 || q.SourcePort > 65535:
		return questionErrorf("--source-port %d: give a port from 1 to 65535", q.SourcePort)
	case !known:
		return questionErrorf("--protocol %q: use TCP, UDP or SCTP", q.Protocol)
	case !slices.Contains(proxymode.Names(), q.ProxyMode):
		return questionErrorf("--proxy-mode %q: use one of %s", q.ProxyMode, strings.Join(proxymode.Names(), ", "))
	}
	return nil
}

// Explain answers a question from the objects in store, as each node's agent decides.
// problems are those of unreadable objects; the relevant ones are part of the answer.
func Explain(q Question, store model.Delta, problems []model.Problem) (*Explanation, error) {
	if err := q.Validate(); err != nil {
		return nil, err
	}
	x := newExplainer(q, store, problems)
	flows, err := x.flows()
	if err != nil {
		return nil, err
	}
	e := &Explanation{
		From: q.From, To: q.To, Port: uint16(q.Port), Protocol: x.proto.String(),
		Decisions: []NodeDecision{}, Problems: x.problems,
	}
	for _, f := range flows {
		one := FlowOutcome{f.From, netip.AddrPortFrom(f.To, f.Port), x.decide(e, f)}
		e.Flows = append(e.Flows, one)
		if e.Outcome != "" && e.Outcome != one.Outcome {
			e.Outcome = Differs
		} else {
			e.Outcome = one.Outcome
		}
	}
	x.note(e)
	x.hint(e)
	e.Notes = x.notes
	return e, nil
}
