package trace

import (
	"fmt"
	"net/netip"
	"os"
	"slices"

	"golang.org/x/sys/unix"

	"spillway.dev/spillway/internal/dataplane/ebpf/inspect"
	"spillway.dev/spillway/internal/facts/model"
)

// socketSteps adds the steps of the socket hooks. It returns the address that the packet
// has after them; done reports that there is no packet, or that its address is not known.
func (t *tracer) socketSteps(dst netip.AddrPort) (to netip.AddrPort, done bool) {
	t.add(t.hookStep())
	to, verdicts, errno, err := t.dryRunConnect(dst)
	if err != nil {
		t.note("The socket hooks could not be run: %v. The steps show what the maps hold.", err)
	}
	t.Verdicts = append(t.Verdicts, verdicts...)
	fe := t.socketFrontend(dst)
	if fe == nil {
		return dst, false
	}
	t.serves = true
	if slices.Contains(fe.Flags, "ranges") {
		list, contains := t.view.SourceRanges(fe.Service, t.From.Addr)
		t.add(Step{
			Name: stepRanges, Lookup: fmt.Sprintf("source_ranges[Service %d, %s]", fe.Service, t.From.Addr),
			Found: fmt.Sprintf("%s: %s", map[bool]string{true: "allowed", false: "not in"}[contains], prefixes(list)),
			Follows: map[bool]string{true: "the hook leaves pods' sockets to the packet path",
				false: "for the node's own sockets, its address counts"}[t.client.kind == podClient],
		})
	}
	verdict, m := decisive(verdicts)
	s := Step{Name: stepSocket, Lookup: "connect()", State: m.state}
	switch {
	case err != nil:
		choice := t.choice(fe, fe.InternalRoute, t.client.cookie, "")
		t.add(choice)
		t.Decision = "the socket hook decides: " + choice.Found
		return dst, true
	case m.state == Refused:
		s.Found, s.Follows = errnoText(errno), m.text+" ("+verdict+")"
		t.add(s)
		t.Refused, t.Decision = true, s.Follows
		return dst, true
	case to == dst:
		s.Found, s.Follows, s.State = "address unchanged", "the hook leaves it to the packet path", Passed
		t.add(s)
		return dst, false
	}
	t.add(t.choice(fe, fe.InternalRoute, t.client.cookie, ""))
	s.Found, s.State = fmt.Sprintf("%s became %s", dst, to), Passed
	s.Follows = fmt.Sprintf("%s (%s)", m.text, verdict)
	if _, affinity := t.view.Endpoints(fe.Service, fe.InternalRoute); affinity == 0 {
		s.Follows += "; each connection chooses anew"
	}
	t.add(s)
	return to, false
}

// hookStep says that the connection begins in a socket hook.
func (t *tracer) hookStep() Step {
	s := Step{Name: stepEntry, Lookup: "pods, node_addrs, cgroup"}
	if t.client.kind == podClient {
		s.Found = fmt.Sprintf("%s is a pod of this node, behind %s; its process %d is in a cgroup with socket hooks", t.From.Addr,
			t.client.device, t.client.pid)
	} else {
		s.Found = fmt.Sprintf("%s is this node's own", t.From.Addr)
	}
	s.Follows = "connect() of a process calls the socket hook connect" + t.version()
	return s
}

// version is the number of the address family: 4 or 6.
func (t *tracer) version() string {
	if t.To.Addr.Is4() {
		return "4"
	}
	return "6"
}

// socketFrontend adds the step of the frontend, and returns its entry if it is a Service's.
func (t *tracer) socketFrontend(dst netip.AddrPort) *inspect.FrontendEntry {
	p := &packet{tracer: t, dst: dst, result: &inspect.DryRunResult{}}
	p.findFrontend()
	if p.frontend == nil || p.frontend.Has("endpoint") {
		return nil
	}
	s, _ := p.frontendStep()
	s.Name = stepFrontend
	t.add(s)
	return p.frontend
}

// dryRunConnect has a process call connect() in a cgroup whose programs note the address and
// let nothing through.
func (t *tracer) dryRunConnect(dst netip.AddrPort) (to netip.AddrPort, verdicts []string, errno unix.Errno, err error) {
	dir, err := newCgroup(t.cgroups.Top)
	if err != nil {
		return to, nil, 0, err
	}
	defer os.Remove(dir)
	hooks, err := t.dry.AttachSocket(dir, model.FamilyOf(dst.Addr()))
	if err != nil {
		return to, nil, 0, err
	}
	defer hooks.Close()
	c, err := t.start(dir, childRequest{Protocol: t.Protocol, Dst: dst, Dry: true})
	if err != nil {
		return to, nil, 0, err
	}
	defer c.end()
	e, err := c.next()
	if err != nil {
		return to, nil, 0, err
	}
	to, verdicts, err = hooks.Result()
	return to, verdicts, unix.Errno(e.Errno), err
}
