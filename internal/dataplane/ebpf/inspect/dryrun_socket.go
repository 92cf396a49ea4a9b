package inspect

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"spillway.dev/spillway/internal/dataplane/ebpf/objects"
	"spillway.dev/spillway/internal/facts/model"
)

// SocketDryRun decides about connect() of the processes in one cgroup, and lets none of them
// send a packet. BPF_PROG_RUN cannot run socket hooks, so a process must call connect():
//
//	connect() ──> the instance's program, loaded once more ──> recorder: notes the address, refuses
type SocketDryRun struct {
	d        *DryRun
	family   model.Family
	links    []link.Link
	recorder *ebpf.Program
	recorded *ebpf.Map
	before   map[string]uint64
}

// recordedAddr is what the recorder notes: the address and the port as in struct bpf_sock_addr.
type recordedAddr struct {
	Addr [16]byte
	Port [4]byte
	Ran  uint32
}

// AttachSocket attaches the dry run to an empty cgroup of the caller. Afterwards, connect()
// of processes in it fails: with EPERM where the programs allow it, else with their error.
func (d *DryRun) AttachSocket(cgroup string, family model.Family) (*SocketDryRun, error) {
	s := &SocketDryRun{d: d, family: family, before: d.counts()}
	if err := s.attach(cgroup); err != nil {
		s.Close()
		return nil, fmt.Errorf("attach dry run of socket hooks: %w", objects.ShortError(err))
	}
	return s, nil
}

func (s *SocketDryRun) attach(cgroup string) error {
	name, at := objects.SockProgConnect4, ebpf.AttachCGroupInet4Connect
	if s.family == model.IPv6 {
		name, at = objects.SockProgConnect6, ebpf.AttachCGroupInet6Connect
	}
	if s.d.sock == nil {
		if err := s.load(); err != nil {
			return err
		}
	}
	var err error
	s.recorded, err = ebpf.NewMap(&ebpf.MapSpec{Name: "recorded", Type: ebpf.Array, KeySize: 4, ValueSize: 24, MaxEntries: 1})
	if err != nil {
		return err
	}
	if s.recorder, err = ebpf.NewProgram(recorder(at, s.recorded)); err != nil {
		return err
	}
	// Programs of one cgroup run in the order in which they were attached.
	for _, p := range []*ebpf.Program{s.d.sock.Programs[name], s.recorder} {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: at, Program: p})
		if err != nil {
			return err
		}
		s.links = append(s.links, l)
	}
	return nil
}

func (s *SocketDryRun) load() error {
	spec, err := objects.LoadSock()
	if err != nil {
		return err
	}
	for name := range spec.Programs {
		if name != objects.SockProgConnect4 && name != objects.SockProgConnect6 {
			delete(spec.Programs, name)
		}
	}
	if err := s.d.prepare(spec); err != nil {
		return err
	}
	maps := s.d.shared(spec)
	for name := range spec.Maps {
		constants := strings.HasPrefix(name, ".") // of each object file
		if own := s.d.tc.Maps[name]; own != nil && maps[name] == nil && spec.Maps[name].Type != ebpf.SkStorage && !constants {
			maps[name] = own // one flow table and one set of counters
		}
	}
	s.d.sock, err = ebpf.NewCollectionWithOptions(spec, ebpf.CollectionOptions{MapReplacements: maps})
	return err
}

// recorder returns a program that notes the address of a socket call and refuses it.
func recorder(at ebpf.AttachType, to *ebpf.Map) *ebpf.ProgramSpec {
	const ip4, ip6, port = 4, 8, 24 // of struct bpf_sock_addr
	words := []int16{ip4}
	if at == ebpf.AttachCGroupInet6Connect {
		words = []int16{ip6, ip6 + 4, ip6 + 8, ip6 + 12}
	}
	code := asm.Instructions{
		asm.Mov.Reg(asm.R6, asm.R1),
		asm.StoreImm(asm.RFP, -4, 0, asm.Word),
		asm.Mov.Reg(asm.R2, asm.RFP),
		asm.Add.Imm(asm.R2, -4),
		asm.LoadMapPtr(asm.R1, to.FD()),
		asm.FnMapLookupElem.Call(),
		asm.JEq.Imm(asm.R0, 0, "refuse"),
	}
	for i, offset := range words {
		code = append(code, asm.LoadMem(asm.R1, asm.R6, offset, asm.Word), asm.StoreMem(asm.R0, int16(4*i), asm.R1, asm.Word))
	}
	code = append(code,
		asm.LoadMem(asm.R1, asm.R6, port, asm.Word), asm.StoreMem(asm.R0, 16, asm.R1, asm.Word),
		asm.StoreImm(asm.R0, 20, 1, asm.Word),
		asm.Mov.Imm(asm.R0, 0).WithSymbol("refuse"),
		asm.Return(),
	)
	return &ebpf.ProgramSpec{Name: "spillway_trace", Type: ebpf.CGroupSockAddr, AttachType: at, License: "Dual BSD/GPL", Instructions: code}
}

// Result returns the address that the last connect() would have used, and the counters that
// grew since AttachSocket.
func (s *SocketDryRun) Result() (to netip.AddrPort, verdicts []string, err error) {
	var r recordedAddr
	if err := s.recorded.Lookup(uint32(0), &r); err != nil {
		return to, nil, fmt.Errorf("read dry run of socket hooks: %w", err)
	}
	if r.Ran == 0 {
		return to, nil, errors.New("dry run of socket hooks: no connect() came")
	}
	addr := netip.AddrFrom4([4]byte(r.Addr[:4]))
	if s.family == model.IPv6 {
		addr = netip.AddrFrom16(r.Addr)
	}
	return netip.AddrPortFrom(addr, binary.BigEndian.Uint16(r.Port[:2])), s.d.increased(s.before), nil
}

// Close detaches the programs.
func (s *SocketDryRun) Close() {
	for _, l := range s.links {
		l.Close()
	}
	if s.recorder != nil {
		s.recorder.Close()
	}
	if s.recorded != nil {
		s.recorded.Close()
	}
}
