package reach

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"connectrpc.com/connect"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/util/exec"

	"spillway.dev/spillway/internal/cli/nodeclient"
	"spillway.dev/spillway/internal/escape"
)

// Reason is why an agent did not answer.
type Reason string

// The reasons.
const (
	NoAgent    Reason = "NoAgent"    // the node has none
	NotProven  Reason = "NotProven"  // it has a Pod that only looks like an agent
	NotRunning Reason = "NotRunning" // its container does not run
	TooOld     Reason = "TooOld"     // it has no api-pipe, or not the method
	NoAPI      Reason = "NoAPI"      // it does not serve its API
	NoAnswer   Reason = "NoAnswer"   // the node, or the agent, does not answer in time
	Forbidden  Reason = "Forbidden"  // a right is missing
	Failed     Reason = "Failed"     // anything else
)

// Error is why an agent did not answer, in one line.
type Error struct {
	Reason Reason
	text   string
}

func (e *Error) Error() string { return e.text }

// Unwrap makes nodeclient.Error show the line as it is.
func (e *Error) Unwrap() error { return nodeclient.Unreachable(e.text) }

// Explain returns the error of a request to an agent as an Error; nil for nil. ctx is the
// context of the request.
func Explain(ctx context.Context, err error) *Error {
	var known *Error
	var answer *connect.Error
	cause := context.Cause(ctx)
	switch {
	case err == nil:
		return nil
	case errors.As(err, &known):
		return known
	case ctx.Err() != nil && errors.As(cause, &known):
		return known
	case errors.As(err, &answer) && answer.Code() == connect.CodeUnimplemented:
		return &Error{TooOld, "its agent does not offer this: it is older than this program, or it serves without"}
	case errors.As(err, &answer) && answer.Code() == connect.CodeDeadlineExceeded:
		return &Error{NoAnswer, "its agent does not answer in time: try again"}
	case errors.As(err, &answer):
		return &Error{Failed, escape.Text(answer.Message())}
	}
	return &Error{Failed, escape.OneLine(err)}
}

// explainExec returns why an exec ended before api-pipe had connected.
func explainExec(err error, stderr string, a Agent) *Error {
	var exit exec.CodeExitError
	var status apierrors.APIStatus
	switch {
	case err == nil:
		return &Error{TooOld, "its agent's image is not Spillway's, or of another version: upgrade it"}
	case errors.As(err, &exit) && exit.Code == exitUsage:
		return &Error{TooOld, "its agent is older than this program, and has no " + Command +
			": upgrade it, or use 'kubectl exec' with the commands that it has"}
	case errors.As(err, &exit):
		line := strings.TrimPrefix(lastLine(stderr), "spillway: ")
		if line == "" {
			line = escape.OneLine(err)
		}
		return &Error{NoAPI, line}
	case errors.As(err, &status):
		return explainStatus(status.Status().Message, err, a)
	}
	return &Error{Failed, escape.OneLine(err)}
}

// exitUsage is cli.ExitUsage: the program in the Pod does not know the command.
const exitUsage = 2

func explainStatus(message string, err error, a Agent) *Error {
	message = escape.Text(message)
	switch {
	case apierrors.IsForbidden(err):
		return &Error{Forbidden, fmt.Sprintf("you may not exec in the agents' Pods: the verbs get and create of pods/exec in namespace %s "+
			"are missing: bind the Role spillway-viewer of that namespace", a.Namespace)}
	case apierrors.IsUnauthorized(err):
		return &Error{Forbidden, "the API server refuses your credentials: log in again"}
	case apierrors.IsNotFound(err):
		return &Error{NotRunning, "its agent's Pod was deleted a moment ago: try again"}
	case apierrors.IsInternalError(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err):
		return &Error{NoAnswer, "the API server does not get an answer of the node's kubelet: " + message}
	}
	return &Error{Failed, message}
}

func lastLine(text string) string {
	text = strings.TrimSpace(text)
	return escape.Text(text[strings.LastIndex(text, "\n")+1:])
}
