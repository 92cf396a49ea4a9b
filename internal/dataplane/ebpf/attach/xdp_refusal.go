package attach

import (
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// explainRefusal adds the driver's own words to the error of an attachment that the driver
// refuses. The kernel gives an error number alone to those who attach by a link, and the words to
// those who attach by rtnetlink. So this tries that, too.
func explainRefusal(refused error, p *ebpf.Program, ifindex int) error {
	var op *netlink.OpError
	if err := setXDP(ifindex, p.FD(), nl.XDP_FLAGS_UPDATE_IF_NOEXIST); errors.As(err, &op) && op.Message != "" {
		return fmt.Errorf("%w (%s)", refused, op.Message)
	} else if err == nil {
		// The cause is gone. The next sync attaches by a link.
		if err := setXDP(ifindex, -1, 0); err != nil {
			return errors.Join(refused, err)
		}
	}
	return refused
}

// setXDP has a driver run a program without a link; fd -1 is no program.
func setXDP(ifindex, fd int, flags uint32) error {
	c, err := netlink.Dial(unix.NETLINK_ROUTE, nil)
	if err != nil {
		return fmt.Errorf("open rtnetlink: %w", err)
	}
	defer c.Close()
	if err := c.SetOption(netlink.ExtendedAcknowledge, true); err != nil {
		return fmt.Errorf("ask rtnetlink for messages: %w", err)
	}
	msg := nl.NewIfInfomsg(unix.AF_UNSPEC)
	msg.Index = int32(ifindex)
	attrs := netlink.NewAttributeEncoder()
	attrs.Nested(unix.IFLA_XDP, func(a *netlink.AttributeEncoder) error {
		a.Int32(nl.IFLA_XDP_FD, int32(fd))
		a.Uint32(nl.IFLA_XDP_FLAGS, flags|nl.XDP_FLAGS_DRV_MODE)
		return nil
	})
	data, err := attrs.Encode()
	if err != nil {
		return fmt.Errorf("set XDP program of interface %d: %w", ifindex, err)
	}
	_, err = c.Execute(netlink.Message{
		Header: netlink.Header{Type: unix.RTM_SETLINK, Flags: netlink.Request | netlink.Acknowledge},
		Data:   append(msg.Serialize(), data...),
	})
	if err != nil {
		return fmt.Errorf("set XDP program of interface %d: %w", ifindex, err)
	}
	return nil
}
