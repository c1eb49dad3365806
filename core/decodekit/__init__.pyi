from decodekit_plugins.frontends.mixin import GenerationMixin as GenerationMixin
from decodekit_plugins.frontends.transitions import compute_transition_scores as compute_transition_scores
from decodekit_plugins.text.lm import LM as LM
from decodekit_plugins.text.lm import load as load

from .api import generate as generate
from .api import plan as plan
from .api import stream as stream
from .config import GenerationConfig as GenerationConfig
from .config import GenerationMode as GenerationMode
from .context import BindContext as BindContext
from .errors import Cancelled as Cancelled
from .errors import ConfigError as ConfigError
from .errors import DecodekitError as DecodekitError
from .errors import GenerationError as GenerationError
from .errors import InputError as InputError
from .errors import MissingExtra as MissingExtra
from .errors import PipelineError as PipelineError
from .errors import PluginBroken as PluginBroken
from .errors import PluginClash as PluginClash
from .errors import PluginError as PluginError
from .errors import PluginNotFound as PluginNotFound
from .fields import at_least as at_least
from .fields import between as between
from .fields import greater_than as greater_than
from .fields import one_of as one_of
from .fields import option as option
from .hooks import hookimpl as hookimpl
from .outputs import GenerateBeamDecoderOnlyOutput as GenerateBeamDecoderOnlyOutput
from .outputs import GenerateDecoderOnlyOutput as GenerateDecoderOnlyOutput
from .run import Run as Run
from .run import Step as Step
from .shortlist import Shortlist as Shortlist
from .traits import Phase as Phase
from .traits import Traits as Traits

__version__: str
