package server

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"

	"connectrpc.com/connect"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	nodev1alpha1 "spillway.dev/spillway/api/node/v1alpha1"
	"spillway.dev/spillway/internal/dataplane"
	"spillway.dev/spillway/internal/decisions/intent"
	"spillway.dev/spillway/internal/facts/model"
	"spillway.dev/spillway/internal/node/conntrack"
	"spillway.dev/spillway/internal/node/kernel"
	"spillway.dev/spillway/internal/reconcile"
)

// service implements the methods of the API.
type service struct{ *Server }

// maxProblems is how many Problems Status returns.
const maxProblems = 200

// Status does not wait for the loop: it answers while a sync takes long.
func (s service) Status(ctx context.Context, _ *nodev1alpha1.StatusRequest) (*nodev1alpha1.StatusResponse, error) {
	st := s.cfg.State.Status()
	resp := &nodev1alpha1.StatusResponse{
		Node: s.cfg.Node, Version: s.cfg.Version, Commit: s.cfg.Commit, Kernel: kernelRelease(),
		Time: timestamppb.Now(), Started: timestamppb.New(s.started), ProxyMode: s.cfg.ProxyMode,
		Sync: &nodev1alpha1.Sync{
			Listed: st.Listed, LastSynced: timestamp(st.LastSynced), PendingSince: timestamp(st.PendingSince),
			Services: count(st.Services), Endpoints: count(st.Endpoints),
		},
		Events: &nodev1alpha1.Events{},
	}
	for _, b := range s.cfg.Backends {
		n := st.Ports[b.Name()]
		resp.Sync.Ports += count(n)
		resp.Dataplanes = append(resp.Dataplanes, &nodev1alpha1.Dataplane{Name: b.Name(), Ports: count(n), Error: st.Errors[b.Name()]})
	}
	for i, p := range st.Problems {
		if i == maxProblems {
			resp.MoreProblems = count(len(st.Problems) - i)
			break
		}
		resp.Problems = append(resp.Problems, problem(p))
	}
	s.describeKernel(resp)
	resp.Egress = s.describeEgress(st)
	if s.cfg.Events != nil {
		resp.Events = s.cfg.Events.Counts()
	}
	for _, f := range s.recentFindings(ctx) {
		resp.Findings = append(resp.Findings, convertFinding(f))
	}
	resp.NetworkNamespace = s.netns
	return resp, nil
}

// ownNetns returns the number of this process's network namespace; 0 if the kernel does not tell.
func ownNetns() uint64 {
	var st unix.Stat_t
	if unix.Stat("/proc/thread-self/ns/net", &st) != nil {
		return 0
	}
	return st.Ino
}

// describeKernel adds tables, hooks and features.
func (s service) describeKernel(resp *nodev1alpha1.StatusResponse) {
	for _, in := range s.inspectors() {
		for _, t := range in.Tables() {
			resp.Tables = append(resp.Tables, &nodev1alpha1.Table{Name: in.Name() + " " + t.Name, Used: t.Used, Size: t.Size})
		}
		for _, h := range in.Hooks() {
			hook := &nodev1alpha1.Hook{Place: h.Place, Program: h.Program, Mechanism: h.Mechanism}
			if h.Err != nil {
				hook.Error = h.Err.Error()
			}
			resp.Hooks = append(resp.Hooks, hook)
		}
		for _, f := range in.Features() {
			resp.Features = append(resp.Features, &nodev1alpha1.Feature{Name: f.Name, Present: f.Present, Detail: f.Detail})
		}
	}
	if t := conntrackTable(); t != nil {
		resp.Tables = append(resp.Tables, t)
	}
	resp.DsrEndpoints = dsrEndpoints(s.dsrEncapsulations())
}

// inspectors returns the dataplanes that can be read.
func (s *Server) inspectors() (list []dataplane.Inspector) {
	for _, b := range s.cfg.Backends {
		if in, ok := b.(dataplane.Inspector); ok {
			list = append(list, in)
		}
	}
	return list
}

// conntrackTable returns the use of conntrack in the agent's network namespace; nil if the
// kernel has none.
func conntrackTable() *nodev1alpha1.Table {
	t := &nodev1alpha1.Table{Name: "conntrack"}
	for name, to := range map[string]*uint64{conntrack.SysctlCount: &t.Used, conntrack.SysctlMax: &t.Size} {
		text, err := kernel.ReadSysctl(conntrack.SysctlPrefix + name)
		if err != nil {
			return nil
		}
		if _, err := fmt.Sscan(text, to); err != nil {
			return nil
		}
	}
	return t
}

// kernelRelease returns what uname -r prints; "" if the kernel does not answer.
func kernelRelease() string {
	var uts unix.Utsname
	if unix.Uname(&uts) != nil {
		return ""
	}
	return unix.ByteSliceToString(uts.Release[:])
}

// The number of Services in a page.
const (
	usualPage   = 500
	largestPage = 1000
)

// ListServices returns a page. Its token is the name of the last Service of the page before,
// so a page costs no memory between two requests, and Services may change meanwhile.
func (s service) ListServices(ctx context.Context, req *nodev1alpha1.ListServicesRequest) (*nodev1alpha1.ListServicesResponse, error) {
	after, err := parseToken(req.PageToken)
	if err != nil {
		return nil, err
	}
	size := int(min(req.PageSize, largestPage))
	if size == 0 {
		size = usualPage
	}
	list, err := s.cfg.State.Services(ctx, req.Namespace, after, size+1)
	if err != nil {
		return nil, err
	}
	problems, counted := problemsByService(s.cfg.State.Status().Problems), s.counted(list[:min(size, len(list))]...)
	found := findingsByService(s.recentFindings(ctx))
	resp := &nodev1alpha1.ListServicesResponse{}
	bytes := 0
	for i, one := range list {
		if i == size || bytes > pageBytes {
			resp.NextPageToken = list[i-1].Spec.Name.String()
			break
		}
		converted := convertService(one, problems[one.Spec.Name], false)
		addCounters(converted, one.Ports, counted)
		addFindings(converted, found[one.Spec.Name])
		bytes += proto.Size(converted)
		resp.Services = append(resp.Services, converted)
	}
	return resp, nil
}

func parseToken(token string) (model.Name, error) {
	if token == "" {
		return model.Name{}, nil
	}
	namespace, name, ok := strings.Cut(token, "/")
	if !ok {
		return model.Name{}, connect.NewError(connect.CodeInvalidArgument, errors.New("page_token: not one of this API"))
	}
	return model.Name{Namespace: namespace, Name: name}, nil
}

// maxDifferences is how many differences GetService returns for a port.
const maxDifferences = 20

// GetService returns a Service, compared with the kernel.
func (s service) GetService(ctx context.Context, req *nodev1alpha1.GetServiceRequest) (*nodev1alpha1.GetServiceResponse, error) {
	name := model.Name{Namespace: req.Namespace, Name: req.Name}
	found, ok, err := s.cfg.State.Service(ctx, name)
	if err != nil {
		return nil, err
	}
	if !ok {
		return nil, connect.NewError(connect.CodeNotFound,
			fmt.Errorf("this node serves no Service %s: it does not exist, is headless, or belongs to another proxy", name))
	}
	out := convertService(found, problemsByService(s.cfg.State.Status().Problems)[name], true)
	addCounters(out, found.Ports, s.counted(found))
	addFindings(out, findingsByService(s.recentFindings(ctx))[name])
	addEncapsulations(out, s.dsrEncapsulations())
	for i, p := range found.Ports {
		if err := s.compare(ctx, p.ID, found.Sync[i], out.Ports[i]); err != nil {
			return nil, err
		}
	}
	if req.CountFlows {
		if err := s.countFlows(ctx, found.Ports, out.Ports); err != nil {
			return nil, fmt.Errorf("count flows of %s: %w", name, err)
		}
	}
	return &nodev1alpha1.GetServiceResponse{Service: out}, nil
}

// counted returns the counters of the ports of Services that a dataplane counts. A failure to
// read them hides them: the Services themselves are known.
func (s service) counted(services ...reconcile.Service) map[intent.PortID]*dataplane.ServiceCounters {
	var ports []intent.PortID
	for _, one := range services {
		for _, p := range one.Ports {
			ports = append(ports, p.ID)
		}
	}
	all := map[intent.PortID]*dataplane.ServiceCounters{}
	for _, b := range s.cfg.Backends {
		if counter, ok := b.(dataplane.ServiceCounter); ok {
			counts, err := counter.ServiceCountersOf(ports)
			if err != nil {
				s.log.Warn("the API cannot read the counters of Services", "err", err)
			}
			maps.Copy(all, counts)
		}
	}
	return all
}

// compare adds how the kernel differs from the last write of a port.
func (s service) compare(ctx context.Context, id intent.PortID, sync reconcile.PortSync, out *nodev1alpha1.ServicePort) error {
	for _, b := range s.cfg.Backends {
		comparer, ok := b.(dataplane.Comparer)
		if !ok || b.Name() != sync.Dataplane {
			continue
		}
		found, err := comparer.Differences(ctx, id, maxDifferences)
		switch {
		case ctx.Err() != nil:
			return fmt.Errorf("compare %s with the kernel: %w", id, err)
		case err != nil:
			s.log.Warn("the API cannot compare a Service port with the kernel", "port", id, "err", err)
			continue
		}
		out.Differences, out.Compared = append(out.Differences, found...), true
	}
	return nil
}

// Drops returns the counters of all dataplanes.
func (s service) Drops(context.Context, *nodev1alpha1.DropsRequest) (*nodev1alpha1.DropsResponse, error) {
	resp := &nodev1alpha1.DropsResponse{}
	for _, in := range s.inspectors() {
		for _, d := range in.Drops() {
			resp.Drops = append(resp.Drops, &nodev1alpha1.Drop{Reason: d.Reason, Meaning: d.Meaning, Packets: d.Packets})
		}
	}
	return resp, nil
}

// WatchFlows sends events until the client leaves.
func (s service) WatchFlows(ctx context.Context, req *nodev1alpha1.WatchFlowsRequest,
	stream *connect.ServerStream[nodev1alpha1.WatchFlowsResponse]) error {
	if s.cfg.Events == nil {
		return connect.NewError(connect.CodeUnimplemented, errors.New("this agent does not follow flows"))
	}
	return s.cfg.Events.Watch(ctx, req, stream.Send)
}
